"""What a rank returns of its samples: columns, which stay where they were made, and facts, which go to the driver."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine3d.startup.lazy_imports import torch
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.sample_batch import COLUMNS, TOKENS, SampleBatch
from hybridflow.batch.sample_fields import SAMPLE, WIDE

if TYPE_CHECKING:
    from torch import Tensor

COUNTED = "counted"
"""The fact that says how many response tokens of a sample the policy wrote."""


@dataclass(frozen=True, eq=False)
class Columns:
    """What a rank has found out about the b samples of its part, whose responses have r tokens.

    Args:
        tokens: name to (r,) tensor, or (r, K) of the columns that have K figures of each token; they stay where they
            are, and become columns of the batch.
        facts: name to (b,) tensor; they go to the driver.
        note: anything else that is small, one a part; it goes to the driver.
    """

    tokens: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Tensor] = field(default_factory=dict)
    note: Any = None


class Kept(ABC):
    """What lies in an object store in a form that its users unpack."""

    @abstractmethod
    def unpack(self) -> Any:
        """What it stands for."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Where some samples lie in what a rank has made of its own.

    Args:
        rows: (n,) int64 numbers of the samples.
        starts, lengths: (n, 2) int64: where the tokens of each begin and how many there are, of the whole sequence and
            of the response alone.
    """

    rows: Tensor
    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Tensor, rows: Tensor) -> Spans:
        """Those of `rows` among samples of (m, 2) `lengths` that lie end to end."""
        return cls(rows, (lengths.cumsum(0) - lengths)[rows], lengths[rows])

    def cut(self, name: str, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Of a column that is called so, the part of each sample, as a view."""
        symbol, _ = COLUMNS[name]
        if symbol == SAMPLE:
            return [array[row : row + 1] for row in self.rows.tolist()]
        kind = 0 if symbol == TOKENS else 1
        spans = zip(self.starts[:, kind].tolist(), self.lengths[:, kind].tolist(), strict=True)
        return [array[start : start + length] for start, length in spans]


@dataclass(frozen=True, eq=False)
class Packed(Kept):
    """Columns as arrays, which the processes of a node can read without a copy.

    Args:
        arrays: by the name of the column; figures of tokens lie end to end, sample by sample.
        whole: whether they are a `SampleBatch`.
    """

    arrays: dict[str, np.ndarray[Any, Any]]
    whole: bool = False

    def take(self, spans: Spans) -> Packed:
        """Some samples."""
        return Packed({name: np.concatenate(spans.cut(name, array)) for name, array in self.arrays.items()}, self.whole)

    def unpack(self) -> SampleBatch | Columns:
        """What was packed."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
        return SampleBatch(**tensors) if self.whole else Columns(tensors)


@dataclass(frozen=True, eq=False)
class Summary:
    """What the driver is told of a result that stays where it is."""

    facts: dict[str, Tensor]
    note: Any = None


def pack(result: Any, asked: Sequence[Any] = ()) -> tuple[Any, Summary | None]:
    """A rank's result as it is kept, and what the driver is told of it; anything but columns stays as it is.

    Args:
        result: what the rank's method returned.
        asked: its arguments, with the samples that columns are of.

    Raises:
        ValueError: columns that do not fit the samples.
    """
    if isinstance(result, SampleBatch):
        return Packed(_arrays(result.columns()), whole=True), Summary(_facts(result))
    if isinstance(result, Columns):
        for samples in asked:
            if isinstance(samples, SampleBatch):
                _check(result, samples)
        facts = {name: fact.detach().cpu() for name, fact in result.facts.items()}
        return Packed(_arrays(result.tokens)), Summary(facts, result.note)
    return result, None


def _check(columns: Columns, samples: SampleBatch) -> None:
    for kind, figures, size, each in (
        ("column", columns.tokens, int(samples.response_lengths.sum()), "response token"),
        ("fact", columns.facts, len(samples), "sample"),
    ):
        for name, figure in figures.items():
            if tuple(figure.shape[:1] if name in WIDE and figure.dim() == 2 else figure.shape) != (size,):
                raise ValueError(
                    f"columns: {kind} {name} has shape {tuple(figure.shape)}, expected ({size},), one figure for each "
                    f"{each} of the batch"
                )


def joined_facts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The facts of all parts, one after another; all have the same names."""
    return {name: torch.cat([facts[name] for facts in parts]) for name in parts[0]}


def unpack(value: Any) -> Any:
    """What was packed, or a batch out of its parts; anything else stays as it is."""
    return value.unpack() if isinstance(value, Kept) else value


@functools.cache
def send_tensors_as_arrays() -> None:
    """Have Ray carry the tensors that this process sends as their values alone.

    Megatron-Core puts a function of its own into how PyTorch pickles a tensor, so that whoever is sent one would have
    to import Megatron-Core: the driver, the rewards, and whoever they send tensors to.
    """
    ray.util.register_serializer(torch.Tensor, serializer=_values, deserializer=_tensor)


def _values(tensor: Tensor) -> tuple[np.ndarray[Any, Any], torch.Size, torch.dtype]:
    values = tensor.detach().cpu().contiguous()
    return values.view(-1).view(torch.uint8).numpy(), values.shape, values.dtype


def _tensor(values: tuple[np.ndarray[Any, Any], torch.Size, torch.dtype]) -> Tensor:
    array, shape, dtype = values
    return torch.from_numpy(array.copy()).view(dtype).view(shape)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: _plain(tensor).numpy() for name, tensor in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, in a dtype that arrays have."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _facts(batch: SampleBatch) -> dict[str, Tensor]:
    facts = {name: column for name, column in batch.columns().items() if COLUMNS[name][0] == SAMPLE}
    return facts | {COUNTED: batch.sums(batch.response_mask)}
