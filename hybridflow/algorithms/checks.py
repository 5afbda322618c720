"""Shape, mask and finiteness checks of an algorithm's tensors. An error is one line with the column and the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


def check_shapes(where: str, *, dimensions: int | None = None, **columns: Tensor | None) -> None:
    """Raise ValueError unless all given columns have one shape, with `dimensions` dimensions.

    Torch would silently broadcast (B,) and (B, 1) to (B, B).

    Args:
        where: the function that asks.
        dimensions: of the shape; any if None.
        columns: by name.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    first, expected = next(iter(shapes.items()))
    if dimensions is not None and len(expected) != dimensions:
        raise ValueError(f"{where}: {first} has shape {expected}, expected {dimensions} dimensions")
    for name, shape in shapes.items():
        if shape != expected:
            raise ValueError(f"{where}: {name} has shape {shape} and {first} {expected}, expected the same")


def check_rows(where: str, *, rows: int, **columns: Tensor) -> None:
    """Raise ValueError for a column that is not (B,), one value for each of B `rows`."""
    for name, column in columns.items():
        if tuple(column.shape) != (rows,):
            raise ValueError(f"{where}: {name} has shape {tuple(column.shape)}, expected ({rows},)")


def check_mask(where: str, mask: Tensor) -> None:
    """Raise ValueError for a mask that is not boolean: one of integers would be taken for indices."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{where}: the mask is {mask.dtype}, expected torch.bool")


def check_finite(where: str, what: str, column: Tensor, mask: Tensor | None = None) -> None:
    """Raise ValueError for a value that is not finite, naming its row and, in a (B, S') column, its token.

    Args:
        where: the function that asks.
        what: name of the value in the error.
        column: (B,) or (B, S') float.
        mask: bool of the column's shape, which values count; all if None.
    """
    bad = ~column.isfinite()
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    index = bad.nonzero()[0].tolist()
    named = f"row {index[0]}" if len(index) == 1 else f"row {index[0]}, token {index[1]}"
    raise ValueError(f"{where}: the {what} of {named} is {float(column[tuple(index)])}, expected a finite number")
