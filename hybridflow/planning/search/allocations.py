"""Groups that roles may be placed in, and the GPUs that groups may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence


def partitions(names: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every partition of names into sets, in a fixed order."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for partition in partitions(rest):
        yield [(first,), *partition]
        for index, block in enumerate(partition):
            yield [*partition[:index], (first, *block), *partition[index + 1 :]]


def allocations(gpus: int, groups: int, gpus_per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to give all GPUs to groups: in single GPUs within a node, else in eighths that are whole nodes.

    A group of fewer GPUs than the steps would have none is not among them.
    """
    step = 1 if gpus <= gpus_per_node else max(gpus_per_node, gpus // 8 // gpus_per_node * gpus_per_node)
    units = gpus // step
    for cuts in itertools.combinations(range(1, units), groups - 1):
        edges = (0, *cuts, units)
        sizes = [(after - before) * step for before, after in itertools.pairwise(edges)]
        sizes[-1] += gpus - units * step
        yield tuple(sizes)
