"""What any batch of samples has of each sample, whichever way its tokens lie."""

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
"""Shape of columns with one figure a sample."""


OF_LOSSES: tuple[str, ...] = ("correction_weights", "lm_weights", "selected", "teacher_logprobs", "teacher_agrees")
"""Columns that only some losses read; of responses, float32."""

WIDE: dict[str, str] = {"chosen_tokens": "int64", "teacher_chosen_logprobs": "float32"}
"""Columns that only some losses read, with K figures for each response token; K is the same in all."""

_OF_RESPONSES = (
    *("advantages", "old_logprobs", "ref_logprobs", "current_logprobs"),
    *("values", "returns", "cost_values", "cost_returns", *OF_LOSSES),
)


def wide(response: str) -> str:
    """The shape of columns with K figures for each response token, where those with one have this shape."""
    return f"{response.rstrip(',)')}, K)"


def column_types(tokens: Mapping[str, str], response: str) -> dict[str, tuple[str, str]]:
    """Shape and name of the dtype of every column of a batch, by its name.

    Args:
        tokens: the columns of tokens, with their shapes.
        response: the shape of columns with one figure for each response token.
    """
    types = dict.fromkeys((field.name for field in dataclasses.fields(SampleFields)), (SAMPLE, "int64"))
    types |= dict.fromkeys(("rewards", "costs"), (SAMPLE, "float32"))
    types |= dict.fromkeys(("reference_logprobs", "began", "ended"), (SAMPLE, "float64"))
    types |= dict.fromkeys(("logprobs", *_OF_RESPONSES, "weights"), (response, "float32"))
    types |= {"response_mask": (response, "bool"), "token_versions": (response, "int64")}
    types |= {name: (wide(response), dtype) for name, dtype in WIDE.items()}
    return {name: (shape, "int64") for name, shape in tokens.items()} | types


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleFields(ABC):
    """B samples with what is known about each. A column "of responses" has one figure for each response token.

    Nothing is ever changed in place: every method returns a new batch.
    """

    types: ClassVar[Mapping[str, tuple[str, str]]]
    """Shape and name of the dtype of every column, by its name."""
    called: ClassVar[str]
    """In errors."""

    prompt_lengths: Tensor
    """(B,) int64: tokens of each prompt, at least 1."""
    response_lengths: Tensor
    """(B,) int64: tokens of each response."""
    response_mask: Tensor
    """Of responses, bool: the tokens that the policy wrote, which are the ones that enter a loss."""
    logprobs: Tensor
    """Of responses, float32: log-prob of each token from the rollout engine."""
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
    """Of responses, int64: version of the weights that drew each token; None where `policy_versions` holds for all."""
    engines: Tensor | None = None
    """(B,) int64: number of the engine that drew the response; -1 where that is not known."""
    began: Tensor | None = None
    """(B,) float64: when the engine was asked for the response, in seconds since the epoch; of a call for several
    responses, when the call began. nan where that is not known."""
    ended: Tensor | None = None
    """(B,) float64: when the response was whole, as `began`."""
    rewards: Tensor | None = None
    """(B,) float32."""
    costs: Tensor | None = None
    """(B,) float32."""
    reference_logprobs: Tensor | None = None
    """(B,) float64: log-prob of each whole response by the reference policy, the sum over its counted tokens."""
    advantages: Tensor | None = None
    """Of responses, float32, 0 outside `response_mask`."""
    old_logprobs: Tensor | None = None
    """Of responses, float32: log-probs of the trainer's weights before its first update."""
    ref_logprobs: Tensor | None = None
    """Of responses, float32: log-probs of the reference policy."""
    current_logprobs: Tensor | None = None
    """Of responses, float32: log-probs of the policy as it was just before an update from these samples."""
    selected: Tensor | None = None
    """Of responses, float32: 1 for the tokens that the loss treats otherwise than the rest, 0 for these."""
    values: Tensor | None = None
    """Of responses, float32: the critic's values."""
    returns: Tensor | None = None
    """Of responses, float32: the critic's targets."""
    cost_values: Tensor | None = None
    """Of responses, float32: the cost critic's values."""
    cost_returns: Tensor | None = None
    """Of responses, float32: the cost critic's targets."""
    correction_weights: Tensor | None = None
    """Of responses, float32: what `algorithm.correction` multiplies the policy loss of each token by."""
    lm_weights: Tensor | None = None
    """Of responses, float32: what the negative log-likelihood of each token is multiplied by in VAPO's loss."""
    teacher_logprobs: Tensor | None = None
    """Of responses, float32: log-probs of the teacher."""
    teacher_agrees: Tensor | None = None
    """Of responses, float32: 1 where the token is the one that the teacher finds most likely, else 0."""
    chosen_tokens: Tensor | None = None
    """Of responses, int64, K of each token: the tokens in whose log-probs policy and teacher are compared."""
    teacher_chosen_logprobs: Tensor | None = None
    """Of responses, float32, K of each token: log-probs of these tokens from the teacher."""
    weights: Tensor | None = None
    """Of responses, float32: weight of each token in the loss of its mini-batch, as `sequence_weights` gives it."""

    def columns(self) -> dict[str, Tensor]:
        """The columns that are there, by name."""
        return {name: column for name in self.types if (column := getattr(self, name)) is not None}

    def __len__(self) -> int:
        """B, the number of samples."""
        return len(self.prompt_lengths)

    @property
    def sequence_lengths(self) -> Tensor:
        """(B,) int64: prompt and response tokens of each sample together."""
        return self.prompt_lengths + self.response_lengths

    def replace(self, **columns: Tensor | None) -> Self:
        """The same batch with the named columns set, for example `batch.replace(rewards=rewards)`."""
        self.check_names(columns)
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def with_origins(self) -> Self:
        """The same batch with `engines`, `began` and `ended`: not known, in one of an earlier version's checkpoint."""
        if self.engines is not None:
            return self
        unknown = torch.full((len(self),), torch.nan, dtype=torch.float64)
        return self.replace(engines=torch.full((len(self),), -1), began=unknown, ended=unknown)

    @property
    def width(self) -> tuple[int, ...]:
        """(K,) of the columns with K figures of each response token; () without such columns."""
        return () if self.chosen_tokens is None else tuple(self.chosen_tokens.shape[-1:])

    @abstractmethod
    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """The samples at `indices` (integers, each at most once), in that order."""

    def split(self, parts: int) -> list[Self]:
        """`parts` consecutive pieces in order; sizes differ by one at most. Raises ValueError for an empty piece."""
        if not 1 <= parts <= len(self):
            raise ValueError(f"{self.called}: cannot split {len(self)} samples into {parts} non-empty parts")
        return [self.select(part) for part in even_ranges(len(self), parts)]

    @classmethod
    def check_names(cls, names: Mapping[str, Any]) -> None:
        """Raise ValueError for one that is no column's."""
        for name in names:
            if name not in cls.types:
                raise ValueError(f"{cls.called}: no column {name!r}, expected one of {', '.join(cls.types)}")

    def _check_columns(self, sizes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Raise ValueError for a column of another shape, dtype or device, and for a sample id that occurs twice."""
        for name, column in self.columns().items():
            symbol, dtype = self.types[name][0], self.dtype_of(name)
            if tuple(column.shape) != sizes[symbol] or column.dtype != dtype or column.device != device:
                raise ValueError(
                    f"{self.called}: column {name} is {tuple(column.shape)} {column.dtype} on {column.device}, "
                    f"expected {symbol} = {sizes[symbol]} {dtype} on {device}"
                )
        ids, counts = self.sample_ids.unique(return_counts=True)
        if len(ids) != len(self):
            twice = int(ids[counts > 1][0])
            raise ValueError(f"{self.called}: sample id {twice} occurs more than once, expected unique ids")

    @classmethod
    def dtype_of(cls, name: str) -> torch.dtype:
        """The dtype of a column."""
        dtype: torch.dtype = getattr(torch, cls.types[name][1])
        return dtype

    @classmethod
    def _rows(cls, indices: Sequence[int] | Tensor) -> Tensor:
        """Rows to select, as int64. Raises ValueError for a mask or fractions."""
        rows = torch.as_tensor(indices)
        if rows.numel() and (rows.dtype.is_floating_point or rows.dtype == torch.bool):
            raise ValueError(f"{cls.called}: select takes integer indices, got {rows.dtype}")
        return rows.to(torch.int64)

    @classmethod
    def _same_columns(cls, batches: Sequence[Self]) -> list[str]:
        """The names that all batches have. Raises ValueError where they differ, or there is no batch."""
        if not batches:
            raise ValueError(f"{cls.called}: concatenate needs at least one batch")
        names = list(batches[0].columns())
        for index, batch in enumerate(batches):
            if list(batch.columns()) != names:
                differing = ", ".join(sorted(set(names) ^ set(batch.columns())))
                raise ValueError(f"{cls.called}: batches 0 and {index} of concatenate differ in {differing}")
        return names


def within(lengths: Tensor, rows: Tensor) -> Tensor:
    """(B, W) bool: which positions of (B, W) rows, padded on the right, lie within (B,) lengths."""
    return torch.arange(rows.shape[1], device=lengths.device) < lengths[:, None]


def pad_rows(values: Tensor, lengths: Tensor, padding: int = 0) -> Tensor:
    """Values that lie end to end, so many (B,) of each row, as (B, W) rows padded on the right; W is the longest.

    (R, K) values become (B, W, K) rows.
    """
    width = int(lengths.max()) if len(lengths) else 0
    rows = values.new_full((len(lengths), width, *values.shape[1:]), padding)
    rows[within(lengths, rows)] = values
    return rows
