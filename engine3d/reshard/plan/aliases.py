"""Which buffers of an engine's rank are already in a trainer's memory, element for element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from engine3d.reshard.describe.shards import Alias, Buffer, Holding, Shards
from engine3d.reshard.describe.strided import contiguous_strides


def find_aliases(sources: Sequence[Shards], target: Shards) -> tuple[Alias, ...]:
    """The target's buffers that can be bound to memory of one source rank at the target's place.

    A buffer can if all its elements are of the model (none is padding), all of them lie in one buffer of the source, of
    the same dtype, and a stride for each dimension of its shape leads to them. Matrices and vectors have to be
    contiguous, because kernels that SGLang calls take their address and nothing else; those of three dimensions, the
    experts, may lie apart. Of several sources at the place the first that has a buffer is taken.

    Args:
        sources: the trainer's ranks; those at other places are not looked at.
        target: the engine's rank.

    Returns:
        One alias a buffer, sorted by buffer.
    """
    of_buffer: dict[int, list[Holding]] = defaultdict(list)
    for holding in target.holdings:
        of_buffer[holding.buffer].append(holding)
    wanted = {holding.tensor for holding in target.holdings}
    near = [(source, _by_tensor(source, wanted)) for source in sources if source.place == target.place]
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
        stride == wanted or size == 1 for size, stride, wanted in list(zip(shape, strides, dense, strict=True))[apart:]
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
        """Where an element of the target is in the source, if this copy has it."""
        left, source = element - self.target, self.source
        if left < 0:
            return None
        for size, source_stride, target_stride in self.dimensions:
            index = min(left // target_stride, size - 1)
            left -= index * target_stride
            source += index * source_stride
        return None if left else source


def _by_tensor(source: Shards, wanted: set[str]) -> dict[str, list[Holding]]:
    found: dict[str, list[Holding]] = defaultdict(list)
    for holding in source.holdings:
        if holding.tensor in wanted:
            found[holding.tensor].append(holding)
    return found


def _alias(
    number: int, buffer: Buffer, holdings: list[Holding], source: Shards, offered: dict[str, list[Holding]]
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
    affine = _affine(buffer.shape, copies)
    return None if affine is None else Alias(number, source.rank, source_buffer, *affine)


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


def _affine(shape: tuple[int, ...], copies: list[_Copy]) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides in the source of a contiguous target that the copies fill, if there are such."""
    own = contiguous_strides(shape)
    offset = _find(copies, 0)
    if offset is None:
        return None
    strides: list[int] = []
    for size, step in zip(reversed(shape), reversed(own), strict=True):
        if size > 1:
            second = _find(copies, step)
            strides.append(-1 if second is None else second - offset)
        else:
            # Never used for an address. That of a contiguous tensor, should someone look.
            strides.append(step)
    strides.reverse()
    if min(strides, default=1) < 1 or (strides and shape[-1] > 1 and strides[-1] != 1):
        return None
    if all(_follows(copy, shape, own, offset, strides) for copy in copies):
        return offset, tuple(strides)
    return None


def _find(copies: list[_Copy], element: int) -> int | None:
    return next((found for copy in copies if (found := copy.source_of(element)) is not None), None)


def _follows(copy: _Copy, shape: tuple[int, ...], own: tuple[int, ...], offset: int, strides: list[int]) -> bool:
    """Whether offset and strides lead to every element of a copy."""
    first = [copy.target // step % size for step, size in zip(own, shape, strict=True)]
    if offset + sum(index * stride for index, stride in zip(first, strides, strict=True)) != copy.source:
        return False
    last = list(first)
    for size, source_stride, target_stride in _refined(copy, own):
        steps = [target_stride // step % length for step, length in zip(own, shape, strict=True)]
        if sum(step * stride for step, stride in zip(steps, strides, strict=True)) != source_stride:
            return False
        last = [index + step * (size - 1) for index, step in zip(last, steps, strict=True)]
    # What does not run over the edge of a dimension is linear in the index.
    return all(index < length for index, length in zip(last, shape, strict=True))


def _refined(copy: _Copy, own: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The copy's dimensions, those that run through several of the target's cut where the target's end."""
    for size, source_stride, target_stride in copy.dimensions:
        inner = 1
        for step in reversed(own):
            more, rest = divmod(step, target_stride * inner)
            if more > 1 and not rest and size % (inner * more) == 0:
                yield more, source_stride * inner, target_stride * inner
                inner *= more
        if size > inner:
            yield size // inner, source_stride * inner, target_stride * inner
