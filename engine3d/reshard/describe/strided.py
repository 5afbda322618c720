"""Views of a contiguous tensor, described as boxes of that tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from engine3d.models.rules import Box


class NotABox(ValueError):
    """The view's elements do not lie in boxes of the tensor: it repeats elements, or runs over the tensor's edges."""


@dataclass(frozen=True, slots=True)
class BoxOfView:
    """A box of the tensor, whose element at index i is the other side's element `offset + (i - start) @ strides`."""

    box: Box
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of a view that runs along a dimension of the tensor.

    Args:
        step: elements of the tensor's dimension from one element of the view to the next.
        size: elements.
        stride: of the other side.
    """

    step: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of one dimension of the tensor, and where its first element and its neighbours are on the other side."""

    start: int
    length: int
    offset: int
    stride: int


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, with no dimension counted as empty."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def boxes_of_view(
    shape: Sequence[int],
    offset: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    other_offset: int,
    other_strides: Sequence[int],
) -> list[BoxOfView]:
    """Describe a view of a contiguous tensor of `shape` as boxes, each with its position on another side.

    The view's element at index i is the tensor's element `offset + i @ strides` and the other side's element
    `other_offset + i @ other_strides`, all in elements. A dimension of one element has stride 0 in the result.

    Raises:
        NotABox: the elements lie in no boxes.
    """
    if prod(sizes) == 0:
        return []
    dense = contiguous_strides(shape)
    starts = [offset // stride % size for stride, size in zip(dense, shape, strict=True)]
    leading = len(shape) - len(sizes)
    if leading >= 0 and tuple(strides) == dense[leading:]:
        box = tuple((start, start + length) for start, length in zip(starts, (*(1,) * leading, *sizes), strict=True))
        if all(stop <= size for (_, stop), size in zip(box, shape, strict=True)):
            # One box, as most views are. The general case below gives the same, more slowly.
            others = (0 if size == 1 else stride for size, stride in zip(sizes, other_strides, strict=True))
            return [BoxOfView(box, other_offset, (*(0,) * leading, *others))]
    axes: list[list[_Axis]] = [[] for _ in shape]
    for size, stride, other in zip(sizes, strides, other_strides, strict=True):
        _place_axis(axes, shape, dense, starts, size, stride, other)
    for start, size, along in zip(starts, shape, axes, strict=True):
        if start + sum(axis.step * (axis.size - 1) for axis in along) >= size:
            raise NotABox("it runs over the edge of a dimension")
    ranges = [list(_ranges(start, along)) for start, along in zip(starts, axes, strict=True)]
    return [
        BoxOfView(
            tuple((interval.start, interval.start + interval.length) for interval in one),
            other_offset + sum(interval.offset for interval in one),
            tuple(interval.stride for interval in one),
        )
        for one in product(*ranges)
    ]


def _place_axis(
    axes: list[list[_Axis]],
    shape: Sequence[int],
    dense: Sequence[int],
    starts: Sequence[int],
    size: int,
    stride: int,
    other: int,
) -> None:
    """Find which dimensions of the tensor a dimension of the view runs along: several where the view merges them."""
    while size > 1:
        if stride == 0:
            raise NotABox("it repeats an element")
        dimension = next(d for d, step in enumerate(dense) if step <= stride and shape[d] > 1)
        length = shape[dimension]
        step, rest = divmod(stride, dense[dimension])
        if rest:
            raise NotABox("it runs across a dimension")
        if starts[dimension] + step * (size - 1) < length:
            axes[dimension].append(_Axis(step, size, other))
            return
        if step != 1 or starts[dimension] or size % length:
            raise NotABox("it runs over the edge of a dimension")
        axes[dimension].append(_Axis(1, length, other))
        size, stride, other = size // length, stride * length, other * length


def _ranges(start: int, axes: list[_Axis]) -> Iterator[_Range]:
    """Ranges of one dimension: one where the other side's neighbours are evenly apart, otherwise several."""
    ascending = sorted(axes, key=lambda axis: axis.step)
    length, stride = 1, 0
    if ascending and ascending[0].step == 1:
        length, stride = ascending[0].size, ascending[0].stride
        ascending = ascending[1:]
        while ascending and ascending[0].step == length and ascending[0].stride == stride * length:
            length *= ascending[0].size
            ascending = ascending[1:]
    for indices in product(*(range(axis.size) for axis in ascending)):
        along = list(zip(indices, ascending, strict=True))
        yield _Range(
            start + sum(index * axis.step for index, axis in along),
            length,
            sum(index * axis.stride for index, axis in along),
            stride,
        )
