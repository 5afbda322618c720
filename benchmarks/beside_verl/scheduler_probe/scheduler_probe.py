"""A plugin of SGLang that times the parts of its scheduler's loop while it decodes.

    SCHEDULER_PROBE=FILE PYTHONPATH=benchmarks/beside_verl/scheduler_probe python benchmarks/beside_verl/compare.py ...
    python benchmarks/beside_verl/scheduler_probe/scheduler_probe.py FILE

The first form appends a line for each 40 decoding steps to the file. It has the milliseconds of a step, of its parts
and of the collections of Python's garbage collector, the page faults, and the microseconds of two loops in the
scheduler's own thread: one of arithmetic, one of cache misses. The second form prints medians by rollout.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

_STEPS = 40
_PAUSE_S = 4.0
"""Seconds without a decoding step between two rollouts."""
_SECTIONS = ("next_batch", "run", "wait", "process")


def register() -> None:
    """Register the hooks, in each process of an engine."""
    if "SCHEDULER_PROBE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = _Probe(Path(os.environ["SCHEDULER_PROBE"]))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor"
    for name, section in (("get_next_batch_to_run", "next_batch"), ("run_batch", "run")):
        HookRegistry.register(f"{scheduler}.{name}", probe.timed(section), HookType.AROUND)
    decode = f"{processor}.SchedulerBatchResultProcessor.process_batch_result_decode"
    HookRegistry.register(decode, probe.processed, HookType.AROUND)


class _Probe:
    """Sums of the current 40 steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rollout = 0
        self._steps = 0
        self._last = self._began = 0.0
        self._seconds = dict.fromkeys(_SECTIONS, 0.0)
        self._collections = [0, 0, 0]
        self._collecting = self._collected = 0.0
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)
        self._objects = [f"{number}x" for number in range(400_000)]
        self._order = random.Random(1).sample(range(400_000), 4_000)
        gc.callbacks.append(self._on_collection)

    def timed(self, section: str) -> Callable[..., Any]:
        """Return a hook that adds the seconds of a call to a section."""

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            self._seconds[section] += time.perf_counter() - begin
            return result

        return around

    def processed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time a step's wait for the GPU and the rest of its processing."""
        now = time.perf_counter()
        if now - self._last > _PAUSE_S:
            self._rollout += 1
            self._reset(now)
        result = kwargs["result"] if "result" in kwargs else args[2]
        if result.copy_done is not None:
            result.copy_done.synchronize()
        waited = time.perf_counter()
        returned = call(*args, **kwargs)
        self._last = time.perf_counter()
        self._seconds["wait"] += waited - now
        self._seconds["process"] += self._last - waited
        self._steps += 1
        if self._steps == _STEPS:
            batch = kwargs["batch"] if "batch" in kwargs else args[1]
            self._write(len(batch.reqs))
        return returned

    def _reset(self, now: float) -> None:
        self._began, self._steps = now, 0
        self._seconds = dict.fromkeys(_SECTIONS, 0.0)
        self._collections, self._collected = [0, 0, 0], 0.0
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)

    def _on_collection(self, phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
            return
        self._collected += time.perf_counter() - self._collecting
        self._collections[details["generation"]] += 1

    def _write(self, requests: int) -> None:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        record = {
            "time": time.time(),
            "rollout": self._rollout,
            "requests": requests,
            "step_ms": (self._last - self._began) / _STEPS * 1e3,
            **{f"{name}_ms": seconds / _STEPS * 1e3 for name, seconds in self._seconds.items()},
            "collections": self._collections,
            "collected_ms": self._collected / _STEPS * 1e3,
            "system_ms": (usage.ru_stime - self._usage.ru_stime) / _STEPS * 1e3,
            "faults": (usage.ru_minflt - self._usage.ru_minflt) / _STEPS,
            **self._loops(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}) + "\n")
        self._last = time.perf_counter()
        self._reset(self._last)

    def _loops(self) -> dict[str, float]:
        times = [time.perf_counter()]
        for _ in range(3):
            sum(number & 7 for number in range(1_000))
            times.append(time.perf_counter())
        arithmetic = min(later - earlier for earlier, later in pairwise(times))
        begin = time.perf_counter()
        sum(len(self._objects[index]) for index in self._order)
        return {"arithmetic_us": arithmetic * 1e6, "misses_us": (time.perf_counter() - begin) * 1e6}


def main() -> None:
    """Print medians by rollout."""
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    names = [name for name, value in records[0].items() if isinstance(value, float) and name != "time"]
    print("rollout", *names, "collections", sep="\t")
    for rollout in sorted({record["rollout"] for record in records}):
        rows = [record for record in records if record["rollout"] == rollout]
        collections = [sum(row["collections"][generation] for row in rows) for generation in range(3)]
        medians = [statistics.median(row[name] for row in rows) for name in names]
        print(rollout, *(f"{median:.3f}" for median in medians), collections, sep="\t")


if __name__ == "__main__":
    main()
