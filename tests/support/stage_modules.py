"""Modules of the stages of the dataflow tests."""

from __future__ import annotations

import time

from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ALL_TO_ALL, DP_PROTO, register


def numbers(step: int) -> list[int]:
    return [step, step + 1, step + 2, step + 3]


def add(first: list[int], second: list[int]) -> list[int]:
    return [one + other for one, other in zip(first, second, strict=True)]


class Ranked:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.calls = 0

    @register(DP_PROTO)
    def process(self, batch: list[int]) -> list[tuple[int, int, int]]:
        self.calls += 1
        return [(self.rank, self.calls, message) for message in batch]

    @register(ALL_TO_ALL)
    def other(self, batch: int) -> int:
        return batch


class Plain:
    pass


class Waits:
    """Says when it was at work."""

    def __call__(self, batch: list[int]) -> list[tuple[float, float]]:
        begin = time.time()
        time.sleep(1.0)
        return [(begin, time.time())] * len(batch)
