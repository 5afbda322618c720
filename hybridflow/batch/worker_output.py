"""A rank's results for its samples: token columns, which stay where they were made, and columns for the driver."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine3d.startup.lazy_imports import torch
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.sample_batch import COLUMNS, TOKEN_ROUTES, TOKENS, SampleBatch
from hybridflow.batch.sample_fields import ROUTES, SAMPLE, WIDE

if TYPE_CHECKING:
    from torch import Tensor

LOSS_TOKENS = "loss_tokens"
"""Per-sample column: response tokens that the policy wrote."""
ROUTE_BYTES, MISSING_ROUTES, OLDER_TOKENS = "route_bytes", "missing_routes", "older_tokens"
"""Per-sample columns of samples with routes: bytes of the routes, tokens but the last whose routes are missing, and
response tokens of older weights than the sample's newest."""
TURN_COUNT, TURN_RETURN_SUM, TURN_RETURN_SQUARES = "turn_count", "turn_return_sum", "turn_return_squares"
"""Per-sample columns of episodes with credit for turns: turns, and the sums of their returns and of the squares."""


@dataclass(frozen=True, eq=False)
class Columns:
    """A rank's results for the b samples of its shard, whose responses have r tokens.

    Args:
        tokens: name to (r,) tensor, or (r, K) of the columns that have K values of each token; they stay where they
            are, and become columns of the batch. Routes are of all tokens, those of prompts too.
        per_sample: name to (b,) tensor; they go to the driver.
        note: any other small value, one a shard; it goes to the driver.
    """

    tokens: dict[str, Tensor] = field(default_factory=dict)
    per_sample: dict[str, Tensor] = field(default_factory=dict)
    note: Any = None


class Kept(ABC):
    """A value in an object store, in a form that its users unpack."""

    @abstractmethod
    def unpack(self) -> Any:
        """Return the value in its own form."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Token spans of some samples in a rank's own results.

    Args:
        rows: (n,) int64 numbers of the samples.
        starts, lengths: (n, 2) int64: first token and number of tokens of each, of the whole sequence and of the
            response alone.
    """

    rows: Tensor
    starts: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: Tensor, rows: Tensor) -> Spans:
        """Return the spans of `rows` among samples of (m, 2) `lengths` that lie end to end."""
        return cls(rows, (lengths.cumsum(0) - lengths)[rows], lengths[rows])

    def cut(self, name: str, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Return each sample's part of the column `name` as a view."""
        symbol, _ = COLUMNS[name]
        if symbol == SAMPLE:
            return [array[row : row + 1] for row in self.rows.tolist()]
        kind = 0 if symbol in (TOKENS, TOKEN_ROUTES) else 1
        spans = zip(self.starts[:, kind].tolist(), self.lengths[:, kind].tolist(), strict=True)
        return [array[start : start + length] for start, length in spans]


@dataclass(frozen=True, eq=False)
class Packed(Kept):
    """Columns as arrays, which the processes of a node can read without a copy.

    Args:
        arrays: by the name of the column; values of tokens lie end to end, sample by sample.
        is_batch: True if they are a `SampleBatch`.
    """

    arrays: dict[str, np.ndarray[Any, Any]]
    is_batch: bool = False

    def take(self, spans: Spans, without: Sequence[str] = ()) -> Packed:
        """Select samples. `without`: columns to leave out."""
        arrays = {name: array for name, array in self.arrays.items() if name not in without}
        return Packed({name: np.concatenate(spans.cut(name, array)) for name, array in arrays.items()}, self.is_batch)

    def unpack(self) -> SampleBatch | Columns:
        """Return the packed batch or columns as tensors."""
        tensors = {name: torch.from_numpy(array.copy()) for name, array in self.arrays.items()}
        return SampleBatch(**tensors, stored_routes=None) if self.is_batch else Columns(tensors)


@dataclass(frozen=True, eq=False)
class Summary:
    """The driver's part of a result whose columns stay where they are."""

    per_sample: dict[str, Tensor]
    note: Any = None


def pack(result: Any, arguments: Sequence[Any] = ()) -> tuple[Any, Summary | None]:
    """Pack a rank's columns or batch for its object store, with a summary for the driver. Keep other results.

    Args:
        result: what the rank's method returned.
        arguments: of the method, with the samples that columns belong to.

    Raises:
        ValueError: columns that do not fit the samples.
    """
    if isinstance(result, SampleBatch):
        result = result.with_routes()
        return Packed(_arrays(result.columns()), is_batch=True), Summary(_per_sample(result))
    if isinstance(result, Columns):
        for samples in arguments:
            if isinstance(samples, SampleBatch):
                _check(result, samples)
        per_sample = {name: column.detach().cpu() for name, column in result.per_sample.items()}
        return Packed(_arrays(result.tokens)), Summary(per_sample, result.note)
    return result, None


def _check(columns: Columns, samples: SampleBatch) -> None:
    routes = {name: column for name, column in columns.tokens.items() if name == ROUTES}
    of_responses = {name: column for name, column in columns.tokens.items() if name != ROUTES}
    for kind, named, size, unit in (
        ("column", routes, int(samples.sequence_lengths.sum()), "token"),
        ("column", of_responses, int(samples.response_lengths.sum()), "response token"),
        ("per-sample column", columns.per_sample, len(samples), "sample"),
    ):
        for name, column in named.items():
            several = name in WIDE or name == ROUTES
            if tuple(column.shape[:1] if several and column.dim() == 2 else column.shape) != (size,):
                raise ValueError(
                    f"columns: {kind} {name} has shape {tuple(column.shape)}, expected ({size},), one value for each "
                    f"{unit} of the batch"
                )


def joined_per_sample(shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the per-sample columns of all shards, which have the same names."""
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def unpack(value: Any) -> Any:
    """Unpack a packed value, or a batch out of its slices. Anything else stays as it is."""
    return value.unpack() if isinstance(value, Kept) else value


@functools.cache
def send_tensors_as_arrays() -> None:
    """Register a serializer with Ray that sends this process's tensors as their values alone.

    Megatron-Core adds a function of its own to PyTorch's pickling of tensors. A receiver of such a tensor would have to
    import Megatron-Core: the driver, the rewards, and the receivers of their tensors. A small tensor also takes an
    eighth of the time and a tenth of the bytes.
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
    """Return a tensor on the CPU, in a dtype that arrays have."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _per_sample(batch: SampleBatch) -> dict[str, Tensor]:
    per_sample = {name: column for name, column in batch.columns().items() if COLUMNS[name][0] == SAMPLE}
    per_sample[LOSS_TOKENS] = batch.sums(batch.response_mask)
    if batch.routes is not None:
        per_sample[ROUTE_BYTES] = batch.sequence_lengths * batch.routes[:1].nbytes
        per_sample[MISSING_ROUTES] = batch.missing_routes
        per_sample[OLDER_TOKENS] = batch.older_tokens
    return per_sample | _turn_sums(batch)


def _turn_sums(batch: SampleBatch) -> dict[str, Tensor]:
    """Sum over the turns of each sample, (B,) float64 each; none where credit is not assigned to turns."""
    if batch.turns is None or batch.turn_returns is None:
        return {}
    sample = torch.arange(len(batch)).repeat_interleave(batch.response_lengths)
    drawn = batch.turns > 0
    # The tokens of a turn share its return.
    turns, first = np.unique(torch.stack([sample, batch.turns])[:, drawn].numpy(), axis=1, return_index=True)
    returns = batch.turn_returns[drawn][torch.from_numpy(first)].double()
    sums = torch.zeros(3, len(batch), dtype=torch.float64)
    sums.index_add_(1, torch.from_numpy(turns[0]), torch.stack([torch.ones_like(returns), returns, returns.square()]))
    return dict(zip((TURN_COUNT, TURN_RETURN_SUM, TURN_RETURN_SQUARES), sums, strict=True))
