"""Check that a trainer and an engine have the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine3d.errors import UserError
from engine3d.models.rules import Box
from engine3d.reshard.describe.grid import CellGrid
from engine3d.reshard.describe.shards import Holding


class Holder(Protocol):
    """A rank of an engine: its shards, or the trace of its loader."""

    @property
    def holdings(self) -> tuple[Holding, ...]: ...


def check_same_model(
    ranks: Sequence[Holder], shapes: Mapping[str, tuple[int, ...]], name: str = "the engine's model"
) -> None:
    """Check that what an engine's ranks hold together is every element of every tensor, and nothing else.

    SGLang's loaders skip unknown names and take their shard of tensors that are too large.

    Args:
        ranks: all of one engine.
        shapes: of every tensor that the trainer has.
        name: how errors call the engine.

    Raises:
        UserError: naming a tensor that only one of the two has, or that has different shapes.
    """
    by_tensor: dict[str, set[Box]] = {tensor: set() for tensor in shapes}
    for rank in ranks:
        for holding in rank.holdings:
            by_tensor.setdefault(holding.tensor, set()).add(holding.box)
    for tensor, boxes in by_tensor.items():
        if not boxes:
            raise UserError(f"tensor {tensor}: the trainer has it in shape {list(shapes[tensor])}, {name} has not")
        sizes = tuple(max(stops) for stops in zip(*(tuple(stop for _, stop in box) for box in boxes), strict=True))
        if tensor not in shapes:
            raise UserError(f"tensor {tensor}: {name} has it in shape {list(sizes)}, the trainer has not")
        if sizes != shapes[tensor]:
            raise UserError(
                f"tensor {tensor}: the trainer has it in shape {list(shapes[tensor])}, {name} in {list(sizes)}"
            )
        if tuple((0, size) for size in sizes) not in boxes:
            _check_covered(tensor, sizes, boxes, name)


def _check_covered(tensor: str, shape: tuple[int, ...], boxes: set[Box], name: str) -> None:
    grid = CellGrid(list(boxes), shape)
    for box in boxes:
        grid.write(box, 0)
    if missing := grid.elements(-1):
        raise UserError(f"tensor {tensor} of shape {list(shape)}: {name} has {missing} of its elements on no rank")
