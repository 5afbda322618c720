"""A graph of one's own stages: each has ranks of its own, and stages without a path between them run at the same time.

python examples/dataflow.py        on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow import DataFlow, Stage


def draw(step: int) -> list[int]:
    """A source: it makes its data from the number of the step."""
    return [step, 10 * step]


class Square:
    """A stage with a state: it is built once on every rank."""

    def __call__(self, batch: Sequence[int]) -> list[int]:
        return [number**2 for number in batch]


def negate(batch: Sequence[int]) -> list[int]:
    """A stage without one."""
    return [-number for number in batch]


def add(squares: Sequence[int], negatives: Sequence[int]) -> list[int]:
    """Two inputs, in the order in which they were connected."""
    return [square + negative for square, negative in zip(squares, negatives, strict=True)]


def main() -> None:
    source = Stage(name="source", module=draw)
    square = Stage(name="square", module=Square, num_workers=2)
    negative = Stage(name="negative", module=negate)
    total = Stage(name="total", module=add)
    flow = DataFlow()
    for before, after in ((source, square), (source, negative), (square, total), (negative, total)):
        flow.connect(before, after)
    print(flow.run(max_steps=2))


if __name__ == "__main__":
    main()
