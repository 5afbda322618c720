"""SampleBatch: the samples of a rollout, from engines to updates, without padding.

The tokens of all samples are end to end, each sample's prompt before its response. The values of response tokens are
end to end too. B is the number of samples, T that of their tokens, R that of the tokens of their responses, and K that
of the values of each response token in the few columns that have several, and C that of the experts of a token in all
layers.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from engine3d.rollout.requests import GIVEN
from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_fields import (
    ROUTES,
    SAMPLE,
    FinishReason,
    SampleFields,
    column_types,
    pad_rows,
    wide,
    within,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine3d.models.experts.routes import TokenRoutes

TOKENS, RESPONSE = "(T,)", "(R,)"
WIDE_RESPONSE, TOKEN_ROUTES = wide(RESPONSE), "(T, C)"
"""Shapes of columns."""
COLUMNS = column_types({"tokens": TOKENS}, RESPONSE, TOKEN_ROUTES)
"""Shape and dtypes of every column of a `SampleBatch`, by its name."""


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
    stored_routes: TokenRoutes | None = None
    """Routes in memory that is shared with other processes. They are no column."""

    def __post_init__(self) -> None:
        if self.prompt_lengths.dim() != 1 or self.response_lengths.shape != self.prompt_lengths.shape:
            raise ValueError(
                f"samples: prompt_lengths has shape {tuple(self.prompt_lengths.shape)} and response_lengths "
                f"{tuple(self.response_lengths.shape)}, expected (B,) each"
            )
        for name, least in (("prompt_lengths", 1), ("response_lengths", 0)):
            if len(self) and (minimum := int(getattr(self, name).min())) < least:
                raise ValueError(f"samples: {name} has {minimum}, expected at least {least}")
        tokens, responses = int(self.sequence_lengths.sum()), int(self.response_lengths.sum())
        sizes: dict[str, tuple[int, ...]] = {TOKENS: (tokens,), RESPONSE: (responses,), SAMPLE: (len(self),)}
        sizes |= {WIDE_RESPONSE: (responses, *self.width), TOKEN_ROUTES: (tokens, *self.route_shape[-1:])}
        self._check_columns(sizes, torch.device("cpu"))

    @property
    def token_routes(self) -> TokenRoutes | None:
        """Routes of every token, by sample: those of the column, or stored ones."""
        from engine3d.models.experts.routes import TokenRoutes

        return self.stored_routes if self.routes is None else TokenRoutes.of(self.routes, self.sequence_lengths)

    def with_routes(self) -> SampleBatch:
        """Copy stored routes into the column `routes`."""
        if self.stored_routes is None:
            return self
        rows = np.concatenate(self.stored_routes.samples)
        return dataclasses.replace(self, routes=torch.from_numpy(rows), stored_routes=None)

    @property
    def is_response(self) -> Tensor:
        """(T,) bool: which of the tokens are of responses."""
        lengths = torch.stack([self.prompt_lengths, self.response_lengths], dim=1).flatten()
        return torch.tensor([False, True]).repeat(len(self)).repeat_interleave(lengths)

    @property
    def missing_routes(self) -> Tensor:
        """(B,) int64: tokens of each sample but its last whose routes are missing in a layer."""
        from engine3d.models.experts.routes import missing

        assert self.routes is not None
        is_missing = (self.routes == missing(self.routes.dtype)).any(1)
        ends = self.sequence_lengths.cumsum(0)
        is_missing[ends - 1] = False
        upto = torch.nn.functional.pad(is_missing.cumsum(0), (1, 0))
        return upto[ends] - upto[ends - self.sequence_lengths]

    @property
    def older_tokens(self) -> Tensor:
        """(B,) int64: response tokens of each sample that older weights have drawn than its newest ones."""
        if self.token_versions is None or self.newest_versions is None:
            return torch.zeros_like(self.response_lengths)
        return self.sums(self.token_versions < self.newest_versions.repeat_interleave(self.response_lengths))

    @property
    def drawing_versions(self) -> Tensor:
        """(T,) int64 version of the weights that drew the next response token after each token.

        These weights have computed the token, and so its route. From the last token that a sample's policy drew on, the
        newest version of the sample.
        """
        newest = self.policy_versions if self.newest_versions is None else self.newest_versions
        versions = newest.repeat_interleave(self.sequence_lengths)
        if self.token_versions is None or not len(versions):
            return versions
        drawn = torch.full_like(versions, GIVEN)
        drawn[self.is_response] = self.token_versions
        count = len(drawn)
        # Number of the first token at or after each one that was drawn.
        numbers = torch.arange(count).where(drawn >= 0, count).flip(0).cummin(0).values.flip(0)
        following = torch.cat([numbers[1:], numbers.new_tensor([count])])
        ends = self.sequence_lengths.cumsum(0).repeat_interleave(self.sequence_lengths)
        return drawn[following.clamp(max=count - 1)].where(following < ends, versions)

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
        turns: Sequence[Sequence[int]] | None = None,
        turn_returns: Sequence[Sequence[float]] | None = None,
        routes: Sequence[np.ndarray[Any, Any] | None] | None = None,
        engine: int | None = None,
        times: Sequence[tuple[float, float]] | None = None,
    ) -> SampleBatch:
        """Build a batch from lists, one entry a sample.

        `finish_reasons` takes the names "stop", "length" and "abort" too. `response_masks` says which response tokens
        the policy wrote; without it, all of them. `token_versions` is of the weights that drew each token. `turns` and
        `turn_returns` are the number and the return of the turn of each.
        `routes` are of the first tokens of each sample, as many as there are rows; those of further ones are missing.
        `engine` is the number of the one that drew all of them, and `times` are when each was requested and complete.
        Raises ValueError naming the sample whose lists do not fit together.
        """
        _check_entries(
            len(prompts),
            responses=responses,
            logprobs=logprobs,
            sample_ids=sample_ids,
            group_ids=group_ids,
            prompt_indices=prompt_indices,
            policy_versions=policy_versions,
            finish_reasons=finish_reasons,
            response_masks=response_masks,
            token_versions=token_versions,
            routes=routes,
            times=times,
        )
        masks = responses if response_masks is None else response_masks
        versions = responses if token_versions is None else token_versions
        _check_tokens(sample_ids, responses, logprobs, masks, versions)
        response_lengths = _int64([len(response) for response in responses])
        batch = cls(
            tokens=_end_to_end((tokens for pair in zip(prompts, responses, strict=True) for tokens in pair), "q"),
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
            turns=None if turns is None else _end_to_end(turns, "q"),
            turn_returns=None if turn_returns is None else _end_to_end(turn_returns, "f"),
            newest_versions=None if token_versions is None else _newest(token_versions, policy_versions),
            routes=None if routes is None else _token_routes(prompts, responses, routes),
            engines=None if engine is None else torch.full((len(prompts),), engine),
            began=None if times is None else _float64([began for began, _ in times]),
            ended=None if times is None else _float64([ended for _, ended in times]),
        )
        batch._check_logprobs()
        return batch

    def _check_logprobs(self) -> None:
        """Raise ValueError for a log-prob that is not finite, naming its sample."""
        bad = (~self.logprobs.isfinite()).nonzero()
        if len(bad):
            sample, token = self.place_of(int(bad[0]))
            raise ValueError(
                f"samples: sample {int(self.sample_ids[sample])} has log-prob {float(self.logprobs[bad[0]])} at "
                f"response token {token}, expected a finite number"
            )

    @classmethod
    def from_padded(cls, columns: Mapping[str, Tensor]) -> SampleBatch:
        """Build a batch from rows that are padded on the right, one a sample.

        Args:
            columns: (B, S) `input_ids` and (B, S') `generated_ids` in place of `tokens`, the other columns of responses
                (B, S') as well, (B, W, C) routes, and the (B,) ones.
        """
        rest = dict(columns)
        prompts, responses = rest.pop("input_ids"), rest.pop("generated_ids")
        mask = within(rest["response_lengths"], responses)
        sequence = torch.cat([within(rest["prompt_lengths"], prompts), mask], dim=1)
        masks = {RESPONSE: mask, WIDE_RESPONSE: mask}
        if (routes := rest.get(ROUTES)) is not None:
            masks[TOKEN_ROUTES] = within(rest["prompt_lengths"] + rest["response_lengths"], routes)
        flat = {
            name: column if COLUMNS[name][0] == SAMPLE else column[masks[COLUMNS[name][0]]]
            for name, column in rest.items()
        }
        return cls(tokens=torch.cat([prompts, responses], dim=1)[sequence], stored_routes=None, **flat)

    def padded(self, column: Tensor) -> Tensor:
        """Pad (R,) or (R, K) values to (B, S') or (B, S', K) rows with zeros on the right. S' is the longest one."""
        return pad_rows(column, self.response_lengths)

    def flat(self, rows: Tensor) -> Tensor:
        """Flatten (B, S') rows to (R,) values, the inverse of `padded`."""
        return rows.masked_select(within(self.response_lengths, rows))

    def sums(self, column: Tensor) -> Tensor:
        """Sum (R,) int64 or bool values of each sample -> (B,) int64."""
        upto = torch.nn.functional.pad(column.cumsum(0, dtype=torch.int64), (1, 0))
        ends = self.response_lengths.cumsum(0)
        return upto[ends] - upto[ends - self.response_lengths]

    def place_of(self, position: int) -> tuple[int, int]:
        """Return the sample, and the token of its response, that a position of (R,) values belongs to."""
        ends = self.response_lengths.cumsum(0)
        sample = int(torch.searchsorted(ends, position, right=True))
        return sample, position - int(ends[sample] - self.response_lengths[sample])

    def prompts(self) -> list[list[int]]:
        """Return the prompt tokens of each sample."""
        lengths = self.prompt_lengths.tolist()
        return [row[:prompt].tolist() for row, prompt in zip(self._sequences(), lengths, strict=True)]

    def responses(self) -> list[list[int]]:
        """Return the response tokens of each sample."""
        lengths = self.prompt_lengths.tolist()
        return [row[prompt:].tolist() for row, prompt in zip(self._sequences(), lengths, strict=True)]

    def select(self, indices: Sequence[int] | Tensor) -> SampleBatch:
        """Select the samples at `indices` (integers, each at most once), in that order."""
        rows = self._rows(indices)
        responses = self.response_lengths.tolist()
        sequences = self.sequence_lengths.tolist()
        lengths = {TOKENS: sequences, TOKEN_ROUTES: sequences, RESPONSE: responses, WIDE_RESPONSE: responses}

        def taken(name: str, column: Tensor) -> Tensor:
            symbol, _ = COLUMNS[name]
            if symbol == SAMPLE:
                return column[rows]
            by_sample = column.split(lengths[symbol])
            return torch.cat([column[:0], *(by_sample[row] for row in rows.tolist())])

        columns = {name: taken(name, column) for name, column in self.with_routes().columns().items()}
        return dataclasses.replace(self, stored_routes=None, **columns)  # type: ignore[arg-type]

    @staticmethod
    def concatenate(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Join batches in order. All must have the same columns."""
        batches = [batch.with_routes() for batch in batches]
        names = SampleBatch._same_columns(batches)
        columns = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
        return dataclasses.replace(batches[0], **columns)  # type: ignore[arg-type]

    def _sequences(self) -> tuple[Tensor, ...]:
        return self.tokens.split(self.sequence_lengths.tolist())


def _newest(token_versions: Sequence[Sequence[int]], policy_versions: Sequence[int]) -> Tensor:
    """(B,) newest version of each sample's tokens; that of its policy without any."""
    pairs = zip(token_versions, policy_versions, strict=True)
    return _int64([max(versions, default=oldest) for versions, oldest in pairs])


def _token_routes(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    routes: Sequence[np.ndarray[Any, Any] | None],
) -> Tensor | None:
    """Join the routes of samples, and fill up the rows that are missing; None where none has any."""
    from engine3d.models.experts.routes import missing

    known = [rows for rows in routes if rows is not None]
    if not known:
        return None
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    of_tokens = torch.from_numpy(np.empty((sum(lengths), *known[0].shape[1:]), known[0].dtype))
    of_tokens.fill_(missing(of_tokens.dtype))
    for rows, of_sample in zip(routes, of_tokens.split(lengths), strict=True):
        if rows is not None:
            of_sample[: len(rows)] = torch.from_numpy(np.array(rows))
    return of_tokens


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _check_entries(prompts: int, **columns: Sequence[Any] | None) -> None:
    """Raise ValueError for a list, by its name, with another number of entries than there are prompts."""
    for name, rows in columns.items():
        if rows is not None and len(rows) != prompts:
            raise ValueError(f"samples: {len(rows)} entries of {name} for {prompts} prompts")


def _check_tokens(
    sample_ids: Sequence[int], responses: Sequence[Sequence[int]], *columns: Sequence[Sequence[Any]]
) -> None:
    """Raise ValueError for a sample that has not as many log-probs, mask entries and versions as response tokens."""
    for sample_id, response, *rows in zip(sample_ids, responses, *columns, strict=True):
        row, mask, version = map(len, rows)
        if {row, mask, version} != {len(response)}:
            raise ValueError(
                f"samples: sample {sample_id} has {len(response)} response tokens, {row} log-probs, "
                f"{mask} mask entries and {version} versions, expected as many of each"
            )


def _end_to_end(rows: Iterable[Sequence[Any]], code: str) -> Tensor:
    """Join all rows in one tensor. `code`: the dtype's code in `array.array`, which reads lists quicker than NumPy."""
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
