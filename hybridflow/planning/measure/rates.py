"""A measured rate, and the clock that rates are measured with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine3d.platform import platform

ROUNDS = 5
"""Times that each measurement is repeated. The shortest counts: other work on the machine makes it longer only."""
_LEAST_S = 20e-3
"""Seconds of a measurement, for which an operation is repeated."""
_MOST_TIMES = 2000


@dataclass(frozen=True)
class MeasuredRate:
    """A rate of a profile.

    Args:
        value: in the unit of the profile.
        origin: sizes that it was measured with.
    """

    value: float
    origin: str


def seconds_of(operation: Callable[[], object]) -> float:
    """Measure the seconds of an operation on the current device: the shortest of some rounds.

    Without a GPU it is processor time of this process, which other processes do not lengthen. The operation must run
    in one thread then.
    """
    clock = time.perf_counter if platform.gpus else time.process_time
    times = 1
    while True:
        taken = _timed(operation, times, clock)
        if taken >= _LEAST_S or times >= _MOST_TIMES:
            break
        times = min(_MOST_TIMES, max(2 * times, round(times * _LEAST_S / max(taken, 1e-6))))
    return min(_timed(operation, times, clock) for _ in range(ROUNDS)) / times


def _timed(operation: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    platform.synchronize()
    began = clock()
    for _ in range(times):
        operation()
    platform.synchronize()
    return clock() - began
