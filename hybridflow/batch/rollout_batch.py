"""RolloutBatch: the one container that flows through a step, from rollout to update.

Prompts and responses are kept apart, and **both are padded on the right**: row `i` of `input_ids` holds
`prompt_lengths[i]` prompt tokens and then padding, row `i` of `generated_ids` holds `response_lengths[i]` tokens and
then padding. The trainer packs sequences from the lengths, so nothing depends on where a pad stands.

B is the number of samples, S the width of the prompts, S' the width of the responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from hybridflow.batch.load_balance import even_ranges


class FinishReason(IntEnum):
    """Why a generation ended: a stop token or string, the length limit, or an abort by the controller."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


PROMPT, RESPONSE, SAMPLE = "(B, S)", "(B, S')", "(B,)"
"""Shapes of columns."""

COLUMNS: dict[str, tuple[str, torch.dtype]] = {
    "input_ids": (PROMPT, torch.int64),
    "prompt_lengths": (SAMPLE, torch.int64),
    "generated_ids": (RESPONSE, torch.int64),
    "response_lengths": (SAMPLE, torch.int64),
    "response_mask": (RESPONSE, torch.bool),
    "logprobs": (RESPONSE, torch.float32),
    "sample_ids": (SAMPLE, torch.int64),
    "group_ids": (SAMPLE, torch.int64),
    "prompt_indices": (SAMPLE, torch.int64),
    "policy_versions": (SAMPLE, torch.int64),
    "finish_reasons": (SAMPLE, torch.int64),
    "rewards": (SAMPLE, torch.float32),
    "costs": (SAMPLE, torch.float32),
    "advantages": (RESPONSE, torch.float32),
    "old_logprobs": (RESPONSE, torch.float32),
    "ref_logprobs": (RESPONSE, torch.float32),
    "values": (RESPONSE, torch.float32),
    "returns": (RESPONSE, torch.float32),
    "cost_values": (RESPONSE, torch.float32),
    "cost_returns": (RESPONSE, torch.float32),
    "weights": (RESPONSE, torch.float32),
}
"""Shape and dtype of every column of a `RolloutBatch`, by its name."""


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """B samples of a rollout with everything that is known about each.

    Construction checks every shape, dtype and device, that lengths fit the widths and that no sample id occurs twice;
    ValueError in one line otherwise. Nothing is ever changed in place: every method returns a new batch.
    """

    input_ids: Tensor
    """(B, S) int64: prompt tokens, padded on the right with `pad_token_id`."""
    prompt_lengths: Tensor
    """(B,) int64: tokens of each prompt, at least 1."""
    generated_ids: Tensor
    """(B, S') int64: response tokens, the end-of-sequence token included, padded on the right."""
    response_lengths: Tensor
    """(B,) int64: tokens of each response."""
    response_mask: Tensor
    """(B, S') bool: the response tokens that the policy wrote, which are the ones that enter a loss."""
    logprobs: Tensor
    """(B, S') float32: log-prob of each response token from the rollout engine, 0 on padding."""
    sample_ids: Tensor
    """(B,) int64: identity of the sample, unique over the run."""
    group_ids: Tensor
    """(B,) int64: identity of the drawn prompt; the samples of one draw share it."""
    prompt_indices: Tensor
    """(B,) int64: index of the prompt, and so of its answer, in the data set."""
    policy_versions: Tensor
    """(B,) int64: version of the weights that generated the response."""
    finish_reasons: Tensor
    """(B,) int64: values of `FinishReason`."""
    pad_token_id: int
    rewards: Tensor | None = None
    """(B,) float32."""
    costs: Tensor | None = None
    """(B,) float32."""
    advantages: Tensor | None = None
    """(B, S') float32, 0 outside `response_mask`."""
    old_logprobs: Tensor | None = None
    """(B, S') float32: log-probs of the same weights, recomputed by the trainer before its first update."""
    ref_logprobs: Tensor | None = None
    """(B, S') float32: log-probs of the reference policy."""
    values: Tensor | None = None
    """(B, S') float32: the critic's values."""
    returns: Tensor | None = None
    """(B, S') float32: the critic's targets."""
    cost_values: Tensor | None = None
    """(B, S') float32: the cost critic's values."""
    cost_returns: Tensor | None = None
    """(B, S') float32: the cost critic's targets."""
    weights: Tensor | None = None
    """(B, S') float32: weight of each token in the loss of its mini-batch, as `sequence_weights` gives it."""

    def __post_init__(self) -> None:
        sizes = {
            PROMPT: tuple(self.input_ids.shape),
            RESPONSE: tuple(self.generated_ids.shape),
            SAMPLE: (self.input_ids.shape[0],) if self.input_ids.dim() else (),
        }
        if len(sizes[PROMPT]) != 2 or len(sizes[RESPONSE]) != 2:
            raise ValueError(
                f"RolloutBatch: input_ids has shape {sizes[PROMPT]} and generated_ids {sizes[RESPONSE]}, "
                "expected two dimensions each"
            )
        if sizes[RESPONSE][0] != sizes[PROMPT][0]:
            raise ValueError(
                f"RolloutBatch: {sizes[PROMPT][0]} rows of input_ids and {sizes[RESPONSE][0]} of generated_ids"
            )
        for name, column in self.columns().items():
            symbol, dtype = COLUMNS[name]
            if tuple(column.shape) != sizes[symbol] or column.dtype != dtype or column.device != self.input_ids.device:
                raise ValueError(
                    f"RolloutBatch: column {name} is {tuple(column.shape)} {column.dtype} on {column.device}, "
                    f"expected {symbol} = {sizes[symbol]} {dtype} on {self.input_ids.device}"
                )
        self._check_facts()

    def _check_facts(self) -> None:
        if not len(self):
            return
        for name, lengths, least, most in (
            ("prompt_lengths", self.prompt_lengths, 1, self.input_ids.shape[1]),
            ("response_lengths", self.response_lengths, 0, self.generated_ids.shape[1]),
        ):
            if int(lengths.min()) < least or int(lengths.max()) > most:
                raise ValueError(
                    f"RolloutBatch: {name} lie in {int(lengths.min())}..{int(lengths.max())}, expected {least}..{most}"
                )
        if bool((self.response_mask & ~_length_mask(self.response_lengths, self.generated_ids.shape[1])).any()):
            raise ValueError("RolloutBatch: response_mask counts a position past its response_length")
        ids, counts = self.sample_ids.unique(return_counts=True)
        if len(ids) != len(self):
            raise ValueError(
                f"RolloutBatch: sample id {int(ids[counts > 1][0])} occurs more than once, expected unique ids"
            )

    def columns(self) -> dict[str, Tensor]:
        """The columns that are there, by name."""
        return {name: column for name in COLUMNS if (column := getattr(self, name)) is not None}

    def __len__(self) -> int:
        """B, the number of samples."""
        return self.input_ids.shape[0]

    @property
    def attention_mask(self) -> Tensor:
        """(B, S) bool: which positions of `input_ids` hold a prompt token."""
        return _length_mask(self.prompt_lengths, self.input_ids.shape[1])

    @property
    def sequence_lengths(self) -> Tensor:
        """(B,) int64: prompt and response tokens of each sample together."""
        return self.prompt_lengths + self.response_lengths

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
        pad_token_id: int,
        response_masks: Sequence[Sequence[bool]] | None = None,
    ) -> RolloutBatch:
        """Build a batch from ragged lists, one entry a sample.

        `finish_reasons` takes the names "stop", "length" and "abort" too. `response_masks` says which response tokens
        the policy wrote; without it, all of them. Raises ValueError naming the sample whose lists do not fit together.
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
        ):
            if len(rows) != len(prompts):
                raise ValueError(f"RolloutBatch: {len(rows)} entries of {name} for {len(prompts)} prompts")
        masks = [[True] * len(response) for response in responses] if response_masks is None else response_masks
        for sample_id, response, row, mask in zip(sample_ids, responses, logprobs, masks, strict=True):
            if len(row) != len(response) or len(mask) != len(response):
                raise ValueError(
                    f"RolloutBatch: sample {sample_id} has {len(response)} response tokens, "
                    f"{len(row)} log-probs and {len(mask)} mask entries, expected as many of each"
                )
        batch = cls(
            input_ids=_pad_rows(prompts, pad_token_id, torch.int64),
            prompt_lengths=_int64([len(prompt) for prompt in prompts]),
            generated_ids=_pad_rows(responses, pad_token_id, torch.int64),
            response_lengths=_int64([len(response) for response in responses]),
            response_mask=_pad_rows(masks, False, torch.bool),
            logprobs=_pad_rows(logprobs, 0.0, torch.float32),
            sample_ids=_int64(sample_ids),
            group_ids=_int64(group_ids),
            prompt_indices=_int64(prompt_indices),
            policy_versions=_int64(policy_versions),
            finish_reasons=_int64([_finish_reason(reason) for reason in finish_reasons]),
            pad_token_id=pad_token_id,
        )
        bad = (~batch.logprobs.isfinite()).nonzero()
        if len(bad):
            row_index, position = bad[0].tolist()
            raise ValueError(
                f"RolloutBatch: sample {sample_ids[row_index]} has log-prob "
                f"{float(batch.logprobs[row_index, position])} at response token {position}, expected a finite number"
            )
        return batch

    def prompts(self) -> list[list[int]]:
        """The prompt tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_lengths.tolist(), strict=True)]

    def responses(self) -> list[list[int]]:
        """The response tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.generated_ids.tolist(), self.response_lengths.tolist(), strict=True)]

    def pad_response_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Make a (B, S') float32 column, 0 on padding, from one 1-D tensor of `response_lengths[i]` values a sample."""
        if [len(row) for row in rows] != self.response_lengths.tolist():
            raise ValueError(
                f"RolloutBatch: rows of {[len(row) for row in rows]} values for responses of "
                f"{self.response_lengths.tolist()} tokens"
            )
        column = torch.zeros(self.generated_ids.shape, dtype=torch.float32, device=self.input_ids.device)
        for index, row in enumerate(rows):
            column[index, : len(row)] = row
        return column

    def replace(self, **columns: Tensor | None) -> RolloutBatch:
        """The same batch with the named columns set, for example `batch.replace(rewards=rewards)`."""
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise ValueError(f"RolloutBatch: no column {unknown[0]!r}, expected one of {', '.join(COLUMNS)}")
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch with every column on `device`."""
        return dataclasses.replace(self, **{name: column.to(device) for name, column in self.columns().items()})  # type: ignore[arg-type]

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """The samples at `indices` (integers, each at most once), in that order; widths stay as they are."""
        rows = torch.as_tensor(indices, device=self.input_ids.device)
        if rows.numel() and (rows.dtype.is_floating_point or rows.dtype == torch.bool):
            raise ValueError(f"RolloutBatch: select takes integer indices, got {rows.dtype}")
        rows = rows.to(torch.int64)
        return dataclasses.replace(self, **{name: column[rows] for name, column in self.columns().items()})  # type: ignore[arg-type]

    def split(self, parts: int) -> list[RolloutBatch]:
        """`parts` consecutive pieces in order; sizes differ by one at most. Raises ValueError for an empty piece."""
        if not 1 <= parts <= len(self):
            raise ValueError(f"RolloutBatch: cannot split {len(self)} samples into {parts} non-empty parts")
        return [self.select(part) for part in even_ranges(len(self), parts)]

    @staticmethod
    def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """One batch of all samples in order, padded to the widest. All must hold the same columns and pad token."""
        if not batches:
            raise ValueError("RolloutBatch: concatenate needs at least one batch")
        first = batches[0]
        names = list(first.columns())
        for index, batch in enumerate(batches):
            if list(batch.columns()) != names or batch.pad_token_id != first.pad_token_id:
                differing = sorted(set(names) ^ set(batch.columns())) or ["pad_token_id"]
                raise ValueError(f"RolloutBatch: batches 0 and {index} of concatenate differ in {', '.join(differing)}")
        widths = {
            PROMPT: max(batch.input_ids.shape[1] for batch in batches),
            RESPONSE: max(batch.generated_ids.shape[1] for batch in batches),
        }

        def widen(name: str, column: Tensor) -> Tensor:
            symbol, _ = COLUMNS[name]
            if symbol == SAMPLE:
                return column
            padding = first.pad_token_id if name in ("input_ids", "generated_ids") else 0
            return torch.nn.functional.pad(column, (0, widths[symbol] - column.shape[1]), value=padding)

        columns = {name: torch.cat([widen(name, getattr(batch, name)) for batch in batches]) for name in names}
        return dataclasses.replace(first, **columns)  # type: ignore[arg-type]


def _length_mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _pad_rows(rows: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    padded = torch.full((len(rows), width), padding, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(list(row), dtype=dtype)
    return padded


def _finish_reason(reason: FinishReason | str) -> int:
    if isinstance(reason, FinishReason):
        return int(reason)
    try:
        return int(FinishReason[reason.upper()])
    except KeyError:
        names = ", ".join(member.name.lower() for member in FinishReason)
        raise ValueError(f"RolloutBatch: finish reason {reason!r}, expected one of {names}") from None
