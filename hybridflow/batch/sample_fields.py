"""Columns that every batch of samples has, in any layout of its tokens."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from engine3d.startup.lazy_imports import torch
from hybridflow.batch.load_balance import even_ranges

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(IntEnum):
    """Why a generation ended: a stop token or string, the length limit, or an abort by the controller."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


SAMPLE = "(B,)"
"""Shape of columns with one value a sample."""


OF_LOSSES: tuple[str, ...] = ("correction_weights", "lm_weights", "selected", "teacher_logprobs", "teacher_agrees")
"""Columns that only some losses read; of responses, float32."""

ROUTES = "routes"
"""Column with the experts of every token, of prompts too: uint8 or int16, C values for each."""

WIDE: dict[str, str] = {"chosen_tokens": "int64", "teacher_chosen_logprobs": "float32"}
"""Columns that only some losses read, with K values for each response token; K is the same in all."""

_OF_RESPONSES = (
    *("advantages", "old_logprobs", "ref_logprobs", "current_logprobs"),
    *("values", "returns", "cost_values", "cost_returns", "turn_returns", *OF_LOSSES),
)


def wide(response: str) -> str:
    """Return the shape of columns with K values for each response token, where those with one have this shape."""
    return f"{response.rstrip(',)')}, K)"


def column_types(tokens: Mapping[str, str], response: str, routes: str) -> dict[str, tuple[str, str]]:
    """Return shape and name of the dtype, or of several, of every column of a batch, by its name.

    Args:
        tokens: the columns of tokens, with their shapes.
        response: the shape of columns with one value for each response token.
        routes: the shape of the experts of every token.
    """
    types = dict.fromkeys((field.name for field in dataclasses.fields(SampleFields)), (SAMPLE, "int64"))
    types |= dict.fromkeys(("rewards", "costs"), (SAMPLE, "float32"))
    types |= dict.fromkeys(("reference_logprobs", "began", "ended"), (SAMPLE, "float64"))
    types |= dict.fromkeys(("logprobs", *_OF_RESPONSES, "weights"), (response, "float32"))
    types |= {"response_mask": (response, "bool")}
    types |= dict.fromkeys(("token_versions", "turns"), (response, "int64"))
    types |= {name: (wide(response), dtype) for name, dtype in WIDE.items()}
    types[ROUTES] = (routes, "uint8 or int16")
    return {name: (shape, "int64") for name, shape in tokens.items()} | types


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleFields(ABC):
    """Columns of B samples. A response column has one value for each response token.

    Nothing is ever changed in place: every method returns a new batch.
    """

    types: ClassVar[Mapping[str, tuple[str, str]]]
    """Shape and name of the dtype, or of several, of every column, by its name."""
    called: ClassVar[str]
    """Name of the batch in errors."""

    prompt_lengths: Tensor
    """(B,) int64: tokens of each prompt, at least 1."""
    response_lengths: Tensor
    """(B,) int64: tokens of each response."""
    response_mask: Tensor
    """Response column, bool: True for tokens that the policy wrote, which are the loss tokens."""
    logprobs: Tensor
    """Response column, float32: log-prob of each token from the rollout engine."""
    sample_ids: Tensor
    """(B,) int64: identity of the sample, unique over the run."""
    group_ids: Tensor
    """(B,) int64: identity of the drawn prompt; the samples of one draw share it."""
    prompt_indices: Tensor
    """(B,) int64: index of the prompt, and so of its answer, in the data set."""
    policy_versions: Tensor
    """(B,) int64: version of the oldest weights that drew a token of the response."""
    finish_reasons: Tensor
    """(B,) int64: values of `FinishReason`."""
    newest_versions: Tensor | None = None
    """(B,) int64: version of the newest weights that drew a token of the response, where it is not that of the
    oldest; None where it is for all."""
    token_versions: Tensor | None = None
    """Response column, int64: version of the weights that drew each token. None where `policy_versions` holds for all.
    """
    turns: Tensor | None = None
    """Response column, int64: number of the turn of an episode that each token belongs to, from 1 in the order of time;
    0 outside `response_mask`. None where credit is not assigned to turns."""
    turn_returns: Tensor | None = None
    """Response column, float32: return of the turn of each token, its own reward and those of later turns; 0 outside
    `response_mask`. None as `turns`."""
    engines: Tensor | None = None
    """(B,) int64: number of the engine that drew the response; -1 where that is not known."""
    began: Tensor | None = None
    """(B,) float64: time of the response's request, in seconds since the epoch; of a call for several responses, of the
    call. nan where it is not known."""
    ended: Tensor | None = None
    """(B,) float64: time at which the response was complete, as `began`."""
    rewards: Tensor | None = None
    """(B,) float32."""
    costs: Tensor | None = None
    """(B,) float32."""
    reference_logprobs: Tensor | None = None
    """(B,) float64: log-prob of each whole response by the reference policy, the sum over its loss tokens."""
    advantages: Tensor | None = None
    """Response column, float32, 0 outside `response_mask`."""
    old_logprobs: Tensor | None = None
    """Response column, float32: log-probs of the trainer's weights before its first update."""
    ref_logprobs: Tensor | None = None
    """Response column, float32: log-probs of the reference policy."""
    current_logprobs: Tensor | None = None
    """Response column, float32: log-probs of the policy just before an update from these samples."""
    selected: Tensor | None = None
    """Response column, float32: 1 for the tokens with a special term in the loss, 0 for the rest."""
    values: Tensor | None = None
    """Response column, float32: the critic's values."""
    returns: Tensor | None = None
    """Response column, float32: the critic's targets."""
    cost_values: Tensor | None = None
    """Response column, float32: the cost critic's values."""
    cost_returns: Tensor | None = None
    """Response column, float32: the cost critic's targets."""
    correction_weights: Tensor | None = None
    """Response column, float32: factor of each token's policy loss, from `algorithm.correction`."""
    lm_weights: Tensor | None = None
    """Response column, float32: factor of each token's negative log-likelihood in VAPO's loss."""
    teacher_logprobs: Tensor | None = None
    """Response column, float32: log-probs of the teacher."""
    teacher_agrees: Tensor | None = None
    """Response column, float32: 1 where the token is the teacher's most likely one, else 0."""
    chosen_tokens: Tensor | None = None
    """Response column, int64, K values a token: the tokens in whose log-probs policy and teacher are compared."""
    teacher_chosen_logprobs: Tensor | None = None
    """Response column, float32, K values a token: log-probs of these tokens from the teacher."""
    routes: Tensor | None = None
    """Token column, uint8 or int16, C values a token: experts of every token of prompt and response, in the format of
    `engine3d.models.experts.routes`. The last token of a sample, which no forward pass had as input, has none.
    """
    weights: Tensor | None = None
    """Response column, float32: weight of each token in the loss of its mini-batch, from `sequence_weights`."""

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that are present, by name."""
        return {name: column for name in self.types if (column := getattr(self, name)) is not None}

    def __len__(self) -> int:
        """Return B, the number of samples."""
        return len(self.prompt_lengths)

    @property
    def sequence_lengths(self) -> Tensor:
        """(B,) int64: prompt and response tokens of each sample together."""
        return self.prompt_lengths + self.response_lengths

    def replace(self, **columns: Tensor | None) -> Self:
        """Return the same batch with the named columns set, for example `batch.replace(rewards=rewards)`."""
        self.check_names(columns)
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def with_origins(self) -> Self:
        """Return the same batch with `engines`, `began` and `ended`, which are not known in an earlier version's
        checkpoint.
        """
        if self.engines is not None:
            return self
        unknown = torch.full((len(self),), torch.nan, dtype=torch.float64)
        return self.replace(engines=torch.full((len(self),), -1), began=unknown, ended=unknown)

    @property
    def route_shape(self) -> tuple[int, ...]:
        """Shape of the routes without its first dimension; () without routes."""
        return () if self.routes is None else tuple(self.routes.shape[1:])

    @property
    def width(self) -> tuple[int, ...]:
        """(K,) of the columns with K values of each response token; () without such columns."""
        return () if self.chosen_tokens is None else tuple(self.chosen_tokens.shape[-1:])

    @abstractmethod
    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """Select the samples at `indices` (integers, each at most once), in that order."""

    def split(self, shards: int) -> list[Self]:
        """Split into consecutive shards, whose sizes differ by one at most. Raises ValueError for an empty one."""
        if not 1 <= shards <= len(self):
            raise ValueError(f"{self.called}: cannot split {len(self)} samples into {shards} non-empty shards")
        return [self.select(shard) for shard in even_ranges(len(self), shards)]

    @classmethod
    def check_names(cls, names: Mapping[str, Any]) -> None:
        """Raise ValueError for one that is no column's."""
        for name in names:
            if name not in cls.types:
                raise ValueError(f"{cls.called}: no column {name!r}, expected one of {', '.join(cls.types)}")

    def _check_columns(self, sizes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Raise ValueError for a column of another shape, dtype or device, and for a sample id that occurs twice."""
        for name, column in self.columns().items():
            symbol, dtypes = self.types[name][0], self.dtypes_of(name)
            if tuple(column.shape) != sizes[symbol] or column.dtype not in dtypes or column.device != device:
                raise ValueError(
                    f"{self.called}: column {name} is {tuple(column.shape)} {column.dtype} on {column.device}, "
                    f"expected {symbol} = {sizes[symbol]} {' or '.join(map(str, dtypes))} on {device}"
                )
        ids, counts = self.sample_ids.unique(return_counts=True)
        if len(ids) != len(self):
            twice = int(ids[counts > 1][0])
            raise ValueError(f"{self.called}: sample id {twice} occurs more than once, expected unique ids")

    @classmethod
    def dtypes_of(cls, name: str) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a column may have."""
        return tuple(getattr(torch, dtype) for dtype in cls.types[name][1].split(" or "))

    @classmethod
    def _rows(cls, indices: Sequence[int] | Tensor) -> Tensor:
        """Return rows to select, as int64. Raises ValueError for a mask or fractions."""
        rows = torch.as_tensor(indices)
        if rows.numel() and (rows.dtype.is_floating_point or rows.dtype == torch.bool):
            raise ValueError(f"{cls.called}: select takes integer indices, got {rows.dtype}")
        return rows.to(torch.int64)

    @classmethod
    def _same_columns(cls, batches: Sequence[Self]) -> list[str]:
        """Return the names that all batches have. Raises ValueError where they differ, or there is no batch."""
        if not batches:
            raise ValueError(f"{cls.called}: concatenate needs at least one batch")
        names = list(batches[0].columns())
        for index, batch in enumerate(batches):
            if list(batch.columns()) != names:
                differing = ", ".join(sorted(set(names) ^ set(batch.columns())))
                raise ValueError(f"{cls.called}: batches 0 and {index} of concatenate differ in {differing}")
        return names


def within(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return (B, W) bool: True for positions of (B, W) rows, padded on the right, within (B,) lengths."""
    return torch.arange(rows.shape[1], device=lengths.device) < lengths[:, None]


def pad_rows(values: Tensor, lengths: Tensor, padding: int = 0) -> Tensor:
    """Return values that are end to end, (B,) counts of each row, as (B, W) rows padded on the right; W is the longest.

    (R, K) values become (B, W, K) rows.
    """
    width = int(lengths.max()) if len(lengths) else 0
    rows = values.new_full((len(lengths), width, *values.shape[1:]), padding)
    rows[within(lengths, rows)] = values
    return rows
