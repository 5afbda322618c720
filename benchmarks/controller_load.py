"""CPU time of the controller itself: the real one over stand-in engines, in real time."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.stand_in_engine import StandInEngine
from benchmarks.stream_load import Setup, Workload, start
from engine3d.rollout.requests import Request
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.stream import RolloutStream


class MeteredEngine(StandInEngine):
    """A stand-in that knows for how long it has had the process's only thread."""

    spent_s = 0.0
    """CPU seconds of all engines."""
    ends = 0

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        began = time.thread_time()
        await super().submit(requests, together=together)
        MeteredEngine.spent_s += time.thread_time() - began

    def _end(self) -> None:
        began, before = time.thread_time(), len(self._ended)
        super()._end()
        MeteredEngine.ends += len(self._ended) - before
        MeteredEngine.spent_s += time.thread_time() - began


@dataclass(frozen=True)
class ControllerLoad:
    """Load of the controller over the measured time.

    Args:
        seconds: that were measured.
        requests_before, requests: in flight at the beginning and at the end.
        groups: in flight, complete or being trained on, at the end.
        ends_per_s: responses that ended in a second.
        steps: that were trained on.
        controller: CPU seconds a second, without those of the engines.
        engines: those of the engines.
        memory_bytes: most that the process had, the engines' books included.
    """

    seconds: float
    requests_before: int
    requests: int
    groups: int
    ends_per_s: float
    steps: int
    controller: float
    engines: float
    memory_bytes: int


def measure_controller(workload: Workload, max_staleness: int, seconds: float, settle_s: float) -> ControllerLoad:
    """Run the controller in real time and measure its load.

    Args:
        workload: whose groups fill all slots; its numbers of steps do not matter.
        max_staleness: of the stream. The trainer takes no time.
        seconds: to measure.
        settle_s: before them, from the first request on.
    """

    async def learn() -> ControllerLoad:
        setup = Setup(workload)
        first, more = workload.step_s
        setup.engines = [
            MeteredEngine(workload.slots, lambda n: first + more * n, setup._length, lambda: setup.version)
            for _ in range(workload.engines)
        ]
        stream = start(setup, StreamLimits(workload.groups, max_staleness), time.monotonic)
        steps = 0

        async def train() -> None:
            nonlocal steps
            while True:
                await stream.take(setup.version)
                await setup.new_weights()
                steps += 1
                stream.trained(setup.version)

        trainer = asyncio.create_task(train())
        await asyncio.sleep(settle_s)
        in_flight = _in_flight(stream, workload.engines)
        began, cpu, spent, ends, before = _now(steps)
        await asyncio.sleep(seconds)
        ended, cpu_, spent_, ends_, after = _now(steps)
        if trainer.done():
            trainer.result()
        trainer.cancel()
        passed = ended - began
        load = ControllerLoad(
            seconds=passed,
            requests_before=in_flight,
            requests=_in_flight(stream, workload.engines),
            groups=stream.ledger.in_flight + stream.ledger.ready + len(stream.ledger.training),
            ends_per_s=(ends_ - ends) / passed,
            steps=after - before,
            controller=(cpu_ - cpu - (spent_ - spent)) / passed,
            engines=(spent_ - spent) / passed,
            memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        stream.close()
        return load

    gc.collect()
    return asyncio.run(learn())


def _in_flight(stream: RolloutStream, engines: int) -> int:
    return sum(stream._dispatcher.in_flight(engine)[0] for engine in range(engines))


def _now(steps: int) -> tuple[Any, ...]:
    return time.monotonic(), time.process_time(), MeteredEngine.spent_s, MeteredEngine.ends, steps
