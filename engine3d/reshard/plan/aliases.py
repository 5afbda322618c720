"""Buffers of an engine's rank that are already in a trainer's memory, element for element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from engine3d.reshard.describe.shards import Alias, Buffer, Holding, RankShards
from engine3d.reshard.describe.strided import contiguous_strides


def find_aliases(sources: Sequence[RankShards], target: RankShards) -> tuple[Alias, ...]:
    """The target's buffers that can be bound to memory of one source rank at the target's location.

    A buffer can if all its elements are of the model (none is padding), all of them lie in one buffer of the source, of
    the same dtype, and a stride for each dimension of its shape leads to them. Matrices and vectors have to be
    contiguous, because kernels that SGLang calls take their address and nothing else; those of three dimensions, the
    experts, may lie apart. Of several sources at the location the first that has a buffer is taken.

    Args:
        sources: the trainer's ranks; those at other locations are not looked at.
        target: the engine's rank.

    Returns:
        One alias a buffer, sorted by buffer.
    """
    of_buffer: dict[int, list[Holding]] = defaultdict(list)
    for holding in target.holdings:
        of_buffer[holding.buffer].append(holding)
    tensors = {holding.tensor for holding in target.holdings}
    near = [(source, _by_tensor(source, tensors)) for source in sources if source.location == target.location]
    aliases = []
    for number, buffer in enumerate(target.buffers):
        for source, offered in near:
            alias = _alias(number, buffer, of_buffer[number], source, offered)
            if alias is not None and _is_usable(buffer.shape, alias.strides):
                aliases.append(alias)
                break
    return tuple(aliases)


def _is_usable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    apart = 1 if len(shape) >= 3 else 0
    dense = contiguous_strides(shape)
    return all(
        stride == dense_stride or size == 1
        for size, stride, dense_stride in list(zip(shape, strides, dense, strict=True))[apart:]
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements that are in both: where the first is, and sizes and strides of the dimensions with several elements."""

    source: int
    target: int
    dimensions: tuple[tuple[int, int, int], ...]
    """(size, source stride, target stride), the largest target stride first."""

    @property
    def elements(self) -> int:
        return prod(size for size, _, _ in self.dimensions)

    def source_of(self, element: int) -> int | None:
        """Locate an element of the target in the source. None if this copy lacks it."""
        left, source = element - self.target, self.source
        if left < 0:
            return None
        for size, source_stride, target_stride in self.dimensions:
            index = min(left // target_stride, size - 1)
            left -= index * target_stride
            source += index * source_stride
        return None if left else source


def _by_tensor(source: RankShards, tensors: set[str]) -> dict[str, list[Holding]]:
    by_tensor: dict[str, list[Holding]] = defaultdict(list)
    for holding in source.holdings:
        if holding.tensor in tensors:
            by_tensor[holding.tensor].append(holding)
    return by_tensor


def _alias(
    number: int, buffer: Buffer, holdings: list[Holding], source: RankShards, offered: dict[str, list[Holding]]
) -> Alias | None:
    pairs = [(mine, theirs) for mine in holdings for theirs in offered.get(mine.tensor, ())]
    meeting = [(copy, theirs.buffer) for mine, theirs in pairs if (copy := _copy(mine, theirs)) is not None]
    source_buffers = {source_buffer for _, source_buffer in meeting}
    copies = [copy for copy, _ in meeting]
    if len(source_buffers) != 1 or sum(copy.elements for copy in copies) != buffer.elements:
        return None
    (source_buffer,) = source_buffers
    if source.buffers[source_buffer].dtype != buffer.dtype:
        return None
    first = min(copy.source for copy in copies)
    affine = _affine(buffer.shape, tuple(replace(copy, source=copy.source - first) for copy in copies))
    if affine is None:
        return None
    offset, strides = affine
    return Alias(number, source.rank, source_buffer, first + offset, strides)


def _copy(mine: Holding, theirs: Holding) -> _Copy | None:
    """The elements of two boxes of one tensor that are in both."""
    source, target, dimensions = theirs.offset, mine.offset, []
    for (mine_start, mine_stop), (their_start, their_stop), source_stride, target_stride in zip(
        mine.box, theirs.box, theirs.strides, mine.strides, strict=True
    ):
        start, stop = max(mine_start, their_start), min(mine_stop, their_stop)
        if start >= stop:
            return None
        source += (start - their_start) * source_stride
        target += (start - mine_start) * target_stride
        if stop - start > 1:
            dimensions.append((stop - start, source_stride, target_stride))
    return _Copy(source, target, tuple(sorted(dimensions, key=lambda dimension: -dimension[2])))


@lru_cache(maxsize=64)  # those of a layer, since layers are mostly alike but for where they begin in the source
def _affine(shape: tuple[int, ...], copies: tuple[_Copy, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides in the source of a contiguous target that the copies fill, if there are such."""
    dense = contiguous_strides(shape)
    offset = _find(copies, 0)
    if offset is None:
        return None
    strides: list[int] = []
    for size, step in zip(reversed(shape), reversed(dense), strict=True):
        if size > 1:
            second = _find(copies, step)
            strides.append(-1 if second is None else second - offset)
        else:
            # Never used for an address. That of a contiguous tensor, should someone look.
            strides.append(step)
    strides.reverse()
    if min(strides, default=1) < 1 or (strides and shape[-1] > 1 and strides[-1] != 1):
        return None
    if all(_follows(copy, shape, dense, offset, strides) for copy in copies):
        return offset, tuple(strides)
    return None


def _find(copies: tuple[_Copy, ...], element: int) -> int | None:
    return next((position for copy in copies if (position := copy.source_of(element)) is not None), None)


def _follows(copy: _Copy, shape: tuple[int, ...], dense: tuple[int, ...], offset: int, strides: list[int]) -> bool:
    """True if offset and strides lead to every element of a copy."""
    first = [copy.target // step % size for step, size in zip(dense, shape, strict=True)]
    if offset + sum(index * stride for index, stride in zip(first, strides, strict=True)) != copy.source:
        return False
    last = list(first)
    for size, source_stride, target_stride in _refined(copy, dense):
        steps = [target_stride // step % length for step, length in zip(dense, shape, strict=True)]
        if sum(step * stride for step, stride in zip(steps, strides, strict=True)) != source_stride:
            return False
        last = [index + step * (size - 1) for index, step in zip(last, steps, strict=True)]
    # What does not run over the edge of a dimension is linear in the index.
    return all(index < length for index, length in zip(last, shape, strict=True))


def _refined(copy: _Copy, dense: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The copy's dimensions, those that run through several of the target's cut where the target's end."""
    for size, source_stride, target_stride in copy.dimensions:
        inner = 1
        for step in reversed(dense):
            more, rest = divmod(step, target_stride * inner)
            if more > 1 and not rest and size % (inner * more) == 0:
                yield more, source_stride * inner, target_stride * inner
                inner *= more
        if size > inner:
            yield size // inner, source_stride * inner, target_stride * inner
