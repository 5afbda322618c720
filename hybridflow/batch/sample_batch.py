"""SampleBatch: the samples of a rollout as they flow through a step, from engines to updates, without padding.

The tokens of all samples lie end to end, each sample's prompt before its response, and so do the figures of response
tokens. B is the number of samples, T that of their tokens, R that of the tokens of their responses, and K that of the
figures of each response token in the few columns that have several.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_fields import SAMPLE, FinishReason, SampleFields, column_types, pad_rows, wide, within

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, RESPONSE = "(T,)", "(R,)"
WIDE_RESPONSE = wide(RESPONSE)
"""Shapes of columns."""
COLUMNS = column_types({"tokens": TOKENS}, RESPONSE)
"""Shape and dtype of every column of a `SampleBatch`, by its name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleBatch(SampleFields):
    """B samples with everything that is known about each, on the CPU; columns of responses are (R,).

    Construction checks every shape and dtype, that lengths add up and that no sample id occurs twice; ValueError in one
    line otherwise. Nothing is ever changed in place: every method returns a new batch.
    """

    types: ClassVar = COLUMNS
    called: ClassVar = "samples"

    tokens: Tensor
    """(T,) int64: prompt and response of each sample, the end-of-sequence token included."""

    def __post_init__(self) -> None:
        if self.prompt_lengths.dim() != 1 or self.response_lengths.shape != self.prompt_lengths.shape:
            raise ValueError(
                f"samples: prompt_lengths has shape {tuple(self.prompt_lengths.shape)} and response_lengths "
                f"{tuple(self.response_lengths.shape)}, expected (B,) each"
            )
        for name, least in (("prompt_lengths", 1), ("response_lengths", 0)):
            if len(self) and (found := int(getattr(self, name).min())) < least:
                raise ValueError(f"samples: {name} has {found}, expected at least {least}")
        tokens, responses = int(self.sequence_lengths.sum()), int(self.response_lengths.sum())
        sizes = {TOKENS: (tokens,), RESPONSE: (responses,), SAMPLE: (len(self),)}
        self._check_columns(sizes | {WIDE_RESPONSE: (responses, *self.width)}, torch.device("cpu"))

    @property
    def is_response(self) -> Tensor:
        """(T,) bool: which of the tokens are of responses."""
        parts = torch.stack([self.prompt_lengths, self.response_lengths], dim=1).flatten()
        return torch.tensor([False, True]).repeat(len(self)).repeat_interleave(parts)

    @classmethod
    def from_generations(
        cls,
        *,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        sample_ids: Sequence[int],
        group_ids: Sequence[int],
        prompt_indices: Sequence[int],
        policy_versions: Sequence[int],
        finish_reasons: Sequence[FinishReason | str],
        response_masks: Sequence[Sequence[bool]] | None = None,
        token_versions: Sequence[Sequence[int]] | None = None,
        engine: int | None = None,
        times: Sequence[tuple[float, float]] | None = None,
    ) -> SampleBatch:
        """Build a batch from lists, one entry a sample.

        `finish_reasons` takes the names "stop", "length" and "abort" too. `response_masks` says which response tokens
        the policy wrote; without it, all of them. `token_versions` is of the weights that drew each token.
        `engine` is the number of the one that drew all of them, and `times` are when each was asked for and whole.
        Raises ValueError naming the sample whose lists do not fit together.
        """
        for name, rows in (
            ("responses", responses),
            ("logprobs", logprobs),
            ("sample_ids", sample_ids),
            ("group_ids", group_ids),
            ("prompt_indices", prompt_indices),
            ("policy_versions", policy_versions),
            ("finish_reasons", finish_reasons),
            ("response_masks", prompts if response_masks is None else response_masks),
            ("token_versions", prompts if token_versions is None else token_versions),
            ("times", prompts if times is None else times),
        ):
            if len(rows) != len(prompts):
                raise ValueError(f"samples: {len(rows)} entries of {name} for {len(prompts)} prompts")
        masks = responses if response_masks is None else response_masks
        versions = responses if token_versions is None else token_versions
        for sample_id, response, *rows in zip(sample_ids, responses, logprobs, masks, versions, strict=True):
            row, mask, version = map(len, rows)
            if {row, mask, version} != {len(response)}:
                raise ValueError(
                    f"samples: sample {sample_id} has {len(response)} response tokens, {row} log-probs, "
                    f"{mask} mask entries and {version} versions, expected as many of each"
                )
        response_lengths = _int64([len(response) for response in responses])
        batch = cls(
            tokens=_end_to_end((part for pair in zip(prompts, responses, strict=True) for part in pair), "q"),
            prompt_lengths=_int64([len(prompt) for prompt in prompts]),
            response_lengths=response_lengths,
            response_mask=torch.ones(int(response_lengths.sum()), dtype=torch.bool)
            if response_masks is None
            else _end_to_end(response_masks, "b").bool(),
            logprobs=_end_to_end(logprobs, "f"),
            sample_ids=_int64(sample_ids),
            group_ids=_int64(group_ids),
            prompt_indices=_int64(prompt_indices),
            policy_versions=_int64(policy_versions),
            finish_reasons=_int64([_finish_reason(reason) for reason in finish_reasons]),
            token_versions=None if token_versions is None else _end_to_end(token_versions, "q"),
            newest_versions=None
            if token_versions is None
            else _int64([max(each, default=oldest) for each, oldest in zip(versions, policy_versions, strict=True)]),
            engines=None if engine is None else torch.full((len(prompts),), engine),
            began=None if times is None else _float64([began for began, _ in times]),
            ended=None if times is None else _float64([ended for _, ended in times]),
        )
        bad = (~batch.logprobs.isfinite()).nonzero()
        if len(bad):
            sample, token = batch.place_of(int(bad[0]))
            raise ValueError(
                f"samples: sample {int(batch.sample_ids[sample])} has log-prob {float(batch.logprobs[bad[0]])} at "
                f"response token {token}, expected a finite number"
            )
        return batch

    @classmethod
    def from_padded(cls, columns: Mapping[str, Tensor]) -> SampleBatch:
        """Build a batch from rows that are padded on the right, one a sample.

        Args:
            columns: (B, S) `input_ids` and (B, S') `generated_ids` in place of `tokens`, the other columns of responses
                (B, S') as well, and the (B,) ones.
        """
        rest = dict(columns)
        prompts, responses = rest.pop("input_ids"), rest.pop("generated_ids")
        mask = within(rest["response_lengths"], responses)
        sequence = torch.cat([within(rest["prompt_lengths"], prompts), mask], dim=1)
        flat = {name: column if COLUMNS[name][0] == SAMPLE else column[mask] for name, column in rest.items()}
        return cls(tokens=torch.cat([prompts, responses], dim=1)[sequence], **flat)

    def padded(self, column: Tensor) -> Tensor:
        """(R,) or (R, K) figures as (B, S') or (B, S', K) rows with zeros on the right; S' is the longest response."""
        return pad_rows(column, self.response_lengths)

    def flat(self, rows: Tensor) -> Tensor:
        """(B, S') rows as (R,) figures: what `padded` is the inverse of."""
        return rows.masked_select(within(self.response_lengths, rows))

    def sums(self, column: Tensor) -> Tensor:
        """(R,) int64 or bool figures -> (B,) int64: the sum of those of each sample."""
        upto = torch.nn.functional.pad(column.cumsum(0, dtype=torch.int64), (1, 0))
        ends = self.response_lengths.cumsum(0)
        return upto[ends] - upto[ends - self.response_lengths]

    def place_of(self, position: int) -> tuple[int, int]:
        """The sample, and the token of its response, that a position of the (R,) figures is about."""
        ends = self.response_lengths.cumsum(0)
        sample = int(torch.searchsorted(ends, position, right=True))
        return sample, position - int(ends[sample] - self.response_lengths[sample])

    def prompts(self) -> list[list[int]]:
        """The prompt tokens of each sample."""
        lengths = self.prompt_lengths.tolist()
        return [row[:prompt].tolist() for row, prompt in zip(self._sequences(), lengths, strict=True)]

    def responses(self) -> list[list[int]]:
        """The response tokens of each sample."""
        lengths = self.prompt_lengths.tolist()
        return [row[prompt:].tolist() for row, prompt in zip(self._sequences(), lengths, strict=True)]

    def select(self, indices: Sequence[int] | Tensor) -> SampleBatch:
        """The samples at `indices` (integers, each at most once), in that order."""
        rows = self._rows(indices)
        responses = self.response_lengths.tolist()
        lengths = {TOKENS: self.sequence_lengths.tolist(), RESPONSE: responses, WIDE_RESPONSE: responses}

        def taken(name: str, column: Tensor) -> Tensor:
            symbol, _ = COLUMNS[name]
            if symbol == SAMPLE:
                return column[rows]
            pieces = column.split(lengths[symbol])
            return torch.cat([column[:0], *(pieces[row] for row in rows.tolist())])

        return dataclasses.replace(self, **{name: taken(name, column) for name, column in self.columns().items()})  # type: ignore[arg-type]

    @staticmethod
    def concatenate(batches: Sequence[SampleBatch]) -> SampleBatch:
        """One batch of all samples in order. All must hold the same columns."""
        names = SampleBatch._same_columns(batches)
        columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
        return dataclasses.replace(batches[0], **columns)  # type: ignore[arg-type]

    def _sequences(self) -> tuple[Tensor, ...]:
        return self.tokens.split(self.sequence_lengths.tolist())


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _end_to_end(rows: Iterable[Sequence[Any]], code: str) -> Tensor:
    """All rows as one tensor. `code`: of the dtype, as `array.array` has it, which reads lists quicker than NumPy."""
    flat = array(code)
    for row in rows:
        flat.extend(array(code, row))
    return torch.from_numpy(np.array(flat))


def _finish_reason(reason: FinishReason | str) -> int:
    if isinstance(reason, FinishReason):
        return int(reason)
    try:
        return int(FinishReason[reason.upper()])
    except KeyError:
        names = ", ".join(member.name.lower() for member in FinishReason)
        raise ValueError(f"samples: finish reason {reason!r}, expected one of {names}") from None
