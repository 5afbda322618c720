"""Split of data over ranks, and the join of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError
from hybridflow.batch.load_balance import even_ranges


@dataclass(frozen=True, slots=True)
class ShardedData:
    """Data split already, one shard for each that a protocol would make."""

    shards: tuple[Any, ...]


def split(data: Any, count: int) -> list[Any]:
    """Split data into `count` consecutive shards whose sizes differ by one at most.

    Raises:
        UserError: fewer rows than shards, shards of another number, or something that cannot be split.
    """
    import torch  # here: every rank imports this module, and not every rank needs torch

    if isinstance(data, ShardedData):
        if len(data.shards) != count:
            raise UserError(f"data comes in {len(data.shards)} shards, expected {count}")
        return list(data.shards)
    if isinstance(data, torch.Tensor | list):
        if len(data) < count:
            raise UserError(f"cannot split {len(data)} rows of data into {count} shards")
        return [data[rows.start : rows.stop] for rows in even_ranges(len(data), count)]
    if hasattr(data, "split") and not isinstance(data, str | bytes):
        try:
            return list(data.split(count))
        except ValueError as error:
            raise UserError(str(error)) from None
    raise UserError(
        f"cannot split a {type(data).__name__} over ranks: pass a tensor, a list or a batch, or pass it by keyword "
        "to give it to every rank whole"
    )


def concatenate(results: Sequence[Any]) -> Any:
    """Join the results of ranks: rows of tensors, lists and batches; None of Nones; anything else stays a list."""
    import torch

    first = results[0]
    if all(result is None for result in results):
        return None
    if all(isinstance(result, torch.Tensor) and result.dim() for result in results):
        return torch.cat(list(results))
    if all(isinstance(result, list) for result in results):
        return [item for result in results for item in result]
    if hasattr(first, "concatenate") and all(type(result) is type(first) for result in results):
        return first.concatenate(list(results))
    return list(results)
