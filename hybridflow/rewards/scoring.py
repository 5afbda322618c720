"""The calls of one reward function for one batch, and the search for the samples at fault where a call fails."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.rewards.process_handle import CallError, RewardInputs, RewardProcess

_MOST_SHARES = 8
_LEAST_SHARE_S = 0.01


def split_calls(samples: int, workers: int, batch_size: int | None) -> list[range]:
    """The samples of each call: as few calls as give every worker one, of `batch_size` samples at most, in order."""
    size = max(1, math.ceil(samples / workers))
    size = size if batch_size is None else min(size, batch_size)
    return [range(first, min(first + size, samples)) for first in range(0, samples, size)]


class Scoring:
    """What one function makes of a batch of B samples. Its workers take the calls in turn, each in a thread."""

    def __init__(self, config: RewardFunctionConfig, batch: RewardInputs) -> None:
        self.config = config
        self.batch = batch
        self.values = [math.nan] * len(batch.texts)
        """The function's number for each sample; nan where it failed."""
        self.failures: dict[int, str] = {}
        """For each sample that failed, why, in words that follow "it"."""
        calls = split_calls(len(batch.texts), config.workers, config.batch_size)
        self.calls: Iterator[range] = iter(calls)
        """The calls that no worker has taken. Threads may share the iterator of a list: each gets another element."""

    def record(self, samples: range, values: Sequence[float | str]) -> None:
        """Note what a call gave: for each of its samples a number, or why there is none."""
        for sample, value in zip(samples, values, strict=True):
            if isinstance(value, str):
                self.fail(range(sample, sample + 1), value)
            else:
                self.values[sample] = value

    def fail(self, samples: range, reason: str) -> None:
        """Note that these samples get no number. Raises UserError where that is to stop the run."""
        if self.config.on_failure == "stop":
            raise UserError(str(CallError(self.config, reason)))
        self.failures.update(dict.fromkeys(samples, reason))


class Worker:
    """Makes calls of a `Scoring` with one process, until none is left.

    A call that fails as a whole fails all its samples only if there is one. Else each is called alone: within the time
    that is left of the call if the function raised or did not return one value for each, or within one more `timeout_s`
    after a hang or a death. Of what is left of that time a sample has an equal share, or an eighth if that is more, so
    that several that hang leave some to the others; whatever has no value by then is failed. Imports do not count
    there, but all that a worker makes for one batch have one `load_timeout_s` together. So a worker with c calls takes
    at most 2 c timeout_s + load_timeout_s, and what it takes to kill and start processes.
    """

    def __init__(self, process: RewardProcess, scoring: Scoring) -> None:
        self.process = process
        self._scoring = scoring
        self._load_left_s = scoring.config.load_timeout_s

    def run(self) -> None:
        """Make the calls.

        Raises:
            UserError: a sample failed, and that is to stop the run.
            KilledError: the process was killed by `RewardProcess.kill`.
        """
        for samples in self._scoring.calls:
            self._call(samples)

    def _call(self, samples: range) -> None:
        if not self._load(samples):
            return
        config = self._scoring.config
        deadline = time.monotonic() + config.timeout_s
        try:
            values = self.process.call(self._scoring.batch, samples, config.timeout_s)
        except CallError as error:
            if len(samples) == 1 or config.on_failure == "stop":
                self._scoring.fail(samples, error.reason)
            else:
                left_s = deadline - time.monotonic() if self.process.running else config.timeout_s
                self._call_each(samples, left_s, error.reason)
        else:
            self._scoring.record(samples, values)

    def _call_each(self, samples: range, left_s: float, reason: str) -> None:
        """Call with one sample at a time, within `left_s` seconds, since the call with all of them failed."""
        for sample in samples:
            alone = range(sample, sample + 1)
            limit_s = max(left_s / min(samples.stop - sample, _MOST_SHARES), _LEAST_SHARE_S)
            if left_s < _LEAST_SHARE_S:
                self._scoring.fail(alone, f"had no time left for sample {sample} alone after it {reason}")
                continue
            if not self._load(alone):
                continue
            started = time.monotonic()
            try:
                values = self.process.call(self._scoring.batch, alone, limit_s)
            except CallError as error:
                self._scoring.fail(alone, error.reason)
            else:
                self._scoring.record(alone, values)
            left_s -= time.monotonic() - started

    def _load(self, samples: range) -> bool:
        """Have the function loaded; if it cannot be, these samples fail."""
        if not self.process.running and self._load_left_s <= 0:
            self._scoring.fail(samples, f"had no time left to be imported again for sample {samples.start}")
            return False
        started = time.monotonic()
        try:
            self.process.load(self._load_left_s)
        except CallError as error:
            self._scoring.fail(samples, error.reason)
            return False
        finally:
            self._load_left_s -= time.monotonic() - started
        return True
