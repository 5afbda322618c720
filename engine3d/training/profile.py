"""A trace of some micro-batches of an update: what they spend their time on."""

from __future__ import annotations

import gzip
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from engine3d.cleaning import cleaning
from engine3d.platform import platform


class UpdateTrace:
    """Some consecutive micro-batches of one update, forward and backward, as torch.profiler sees them on this rank.

    They begin with the second micro-batch where the update has enough, since the first one is often not like the
    others; with the first one otherwise. A pipeline stage goes forward with some micro-batches before it goes backward
    with the first one: there they begin after those, and as many backward passes, of earlier ones, are between their
    forward passes. The trace ends when the micro-batch after them begins, or with the schedule.

    With virtual stages all micro-batches are traced, each once per model chunk: the interleaved schedule has messages
    in flight between any two of them, and torch.profiler fails where it begins while an operation is in flight.

    Args:
        path: of the file to write, in Chrome's trace event format; its name ends in `.json.gz`. The forward pass of the
            n-th micro-batch of the update, from 1, is the event `micro-batch n`.
        micro_batches: how many of them; all that there are if the update has fewer.
        ahead: forward passes of this rank before its first backward pass, but for that one's own.
    """

    def __init__(self, path: Path, micro_batches: int, *, ahead: int = 0) -> None:
        self._path, self._micro_batches, self._ahead = path, micro_batches, ahead
        self._profiler: profile | None = None

    def run(
        self,
        schedule: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        num_microbatches: int,
        model: list[Any],
        **arguments: Any,
    ) -> Any:
        """Run one of Megatron-Core's pipeline schedules with these arguments, traced, and return its result."""
        first = max(0, min(max(1, self._ahead), num_microbatches - self._micro_batches))
        numbers, complete = itertools.count(), len(model) > 1

        def forward_step(*step: Any) -> Any:
            number = next(numbers)
            if number == first and not complete:
                self._begin()
            elif number == first + self._micro_batches and not complete:
                self._write()
            with record_function(f"micro-batch {number + 1}"):
                return forward_step_func(*step)

        if complete:
            self._begin()
        try:
            results = schedule(
                forward_step_func=forward_step, num_microbatches=num_microbatches, model=model, **arguments
            )
            self._write()
        finally:
            with cleaning("profile"):
                self._end()  # where the schedule failed; a process has one profiler
        return results

    def _begin(self) -> None:
        platform.synchronize()
        devices = [ProfilerActivity.CUDA] if platform.device_type == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *devices])
        with warnings.catch_warnings():
            # It keeps the last of several cycles; this is one. With acc_events it would make an object of each event.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._profiler.start()

    def _end(self) -> profile | None:
        """End the profiler, if it runs; it has the events."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            platform.synchronize()
            profiler.stop()
        return profiler

    def _write(self) -> None:
        """End the profiler, if it runs, and write its events, all of them or none."""
        profiler = self._end()
        if profiler is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=self._path.parent) as directory:
                events, packed = Path(directory) / "trace.json", Path(directory) / "trace.json.gz"
                profiler.export_chrome_trace(str(events))
                # PyTorch itself compresses line by line, at the slowest level.
                with events.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                packed.replace(self._path)
