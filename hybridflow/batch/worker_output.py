"""What a rank returns of its samples: columns, which stay where they were made, and facts, which go to the driver."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray.util
import torch
from torch import Tensor

from hybridflow.batch.rollout_batch import COLUMNS, SAMPLE, RolloutBatch

COUNTED = "counted"
"""The fact that says how many response tokens of a sample the policy wrote."""


@dataclass(frozen=True, eq=False)
class Columns:
    """What a rank has found out about the b samples of its part.

    Args:
        tokens: name to (b, S') tensor; they stay where they are, and become columns of the batch.
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
class Packed(Kept):
    """Columns as arrays, which the processes of a node can read without a copy. A bare tensor has the name ""."""

    arrays: dict[str, np.ndarray[Any, Any]]
    pad_token_id: int | None = None

    def take(self, rows: Sequence[int]) -> Packed:
        """Some rows of all columns."""
        return Packed({name: array[list(rows)] for name, array in self.arrays.items()}, self.pad_token_id)

    def unpack(self) -> RolloutBatch | Columns | Tensor:
        """What was packed."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
        if self.pad_token_id is not None:
            return RolloutBatch(**tensors, pad_token_id=self.pad_token_id)
        return tensors[""] if list(tensors) == [""] else Columns(tensors)


@dataclass(frozen=True, eq=False)
class Summary:
    """What the driver is told of a result that stays where it is."""

    facts: dict[str, Tensor]
    note: Any = None
    pad_token_id: int | None = None


def pack(result: Any) -> tuple[Any, Summary | None]:
    """A rank's result as it is kept, and what the driver is told of it; anything but columns stays as it is."""
    if isinstance(result, RolloutBatch):
        return Packed(_arrays(result.columns()), result.pad_token_id), Summary(
            _facts(result), None, result.pad_token_id
        )
    if isinstance(result, Columns):
        facts = {name: fact.detach().cpu() for name, fact in result.facts.items()}
        return Packed(_arrays(result.tokens)), Summary(facts, result.note)
    if isinstance(result, Tensor) and result.dim() > 1:
        return Packed(_arrays({"": result})), None
    return result, None


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
    ray.util.register_serializer(Tensor, serializer=_values, deserializer=_tensor)


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


def _facts(batch: RolloutBatch) -> dict[str, Tensor]:
    facts = {name: column for name, column in batch.columns().items() if COLUMNS[name][0] == SAMPLE}
    return facts | {COUNTED: batch.response_mask.sum(dim=1)}
