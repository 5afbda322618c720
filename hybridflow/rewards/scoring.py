"""The calls of one reward function for one batch, and the search for the samples at fault where a call fails."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.rewards.processes.handle import CallError, CallResult, RewardInputs, RewardProcess
from hybridflow.rewards.processes.pool import ProcessPool

_MOST_SHARES = 8
_LEAST_SHARE_S = 0.01


def split_calls(samples: int, workers: int, batch_size: int | None) -> list[range]:
    """Split samples into calls, in order: as few as give every worker one, of `batch_size` samples at most."""
    size = max(1, math.ceil(samples / workers))
    size = size if batch_size is None else min(size, batch_size)
    return [range(first, min(first + size, samples)) for first in range(0, samples, size)]


class Scoring:
    """Scoring of a batch of B samples by one function. Its workers take the calls in turn, each in a thread."""

    def __init__(self, config: RewardFunctionConfig, batch: RewardInputs) -> None:
        self.config = config
        self.batch = batch
        self.values = [math.nan] * len(batch.texts)
        """The function's number for each sample; nan where it failed."""
        self.failures: dict[int, str] = {}
        """Reason of each sample that failed, in words that follow "it"."""
        self.metrics: dict[str, list[float]] = {}
        """Further values of the function for each sample, by name. nan where there is none."""
        self.counts: dict[str, list[float]] = {}
        """Counts of the function for each sample, by name: the sum over all calls with the sample."""
        calls = split_calls(len(batch.texts), config.workers, config.batch_size)
        self.most_workers = min(config.workers, len(calls))
        """Workers that have a call to make."""
        self.calls: Iterator[range] = iter(calls)
        """The calls that no worker has taken. Threads may share the iterator of a list: each gets another element."""

    def record(self, samples: Sequence[int], answer: CallResult) -> dict[int, str]:
        """Record a call's result for these samples. Returns the reason of each that has no number."""
        for kind, given in ((self.metrics, answer.metrics), (self.counts, answer.counts)):
            for name, column in given.items():
                noted = kind.setdefault(name, [math.nan] * len(self.values))
                for sample, further in zip(samples, column, strict=True):
                    if further is not None:
                        counted = kind is self.counts and not math.isnan(noted[sample])
                        noted[sample] = further + (noted[sample] if counted else 0.0)
        failed = {}
        for sample, value in zip(samples, answer.values, strict=True):
            if isinstance(value, str):
                failed[sample] = value
            else:
                self.values[sample] = value
        return failed

    def fail(self, failed: Mapping[int, str]) -> None:
        """Record why these samples get no number. Raises UserError if that is to stop the run."""
        if failed and self.config.on_failure == "stop":
            raise UserError(str(CallError(self.config, next(iter(failed.values())))))
        self.failures.update(failed)


class Worker:
    """Makes calls of a `Scoring`, each with a process that is free, until none is left.

    A call that fails for all samples fails them only if there is one. Else each is called alone: within the time
    that is left of the call if the function raised or did not return one value for each, or within one more `timeout_s`
    after a hang or a death. Of what is left of that time a sample has an equal share, or an eighth if that is more, so
    that several that hang leave some to the others; whatever has no value by then is failed. Imports do not count
    there, but all that a worker makes for one batch have one `load_timeout_s` together. Samples without a number are
    tried again up to `retries` times, together if all failed, else one by one; each time has the limits
    of the first. So a worker with c calls takes at most 2 c (1 + retries) timeout_s + load_timeout_s, the waits before
    retries, what it takes to kill and start processes, and what it waits for those that other batches use.
    """

    def __init__(self, processes: ProcessPool, scoring: Scoring) -> None:
        self._processes, self._scoring = processes, scoring
        self._load_left_s = scoring.config.load_timeout_s

    def run(self) -> None:
        """Make the calls.

        Raises:
            UserError: a sample failed, and that is to stop the run.
            KilledError: the processes were killed by `ProcessPool.kill`.
        """
        for samples in self._scoring.calls:
            with self._processes.taken() as process:
                self._call(process, samples)

    def _call(self, process: RewardProcess, samples: range) -> None:
        """Make a call, and retries with the samples that have no number."""
        config = self._scoring.config
        failed = self._attempt(process, samples)
        for wait_s in config.waits_s:
            if not failed:
                break
            process.pause(wait_s * random.uniform(0.5, 1.0))  # so that workers do not retry all at once
            all_failed = len(failed) == len(samples)
            failed = (
                self._attempt(process, samples) if all_failed else self._call_each(process, failed, config.timeout_s)
            )
        self._scoring.fail(failed)

    def _attempt(self, process: RewardProcess, samples: range) -> dict[int, str]:
        """Call with all samples. Returns the reason of each that has no number, as the methods below."""
        if (failed := self._load(process, samples)) is not None:
            return failed
        config = self._scoring.config
        deadline = time.monotonic() + config.timeout_s
        try:
            answer = process.call(self._scoring.batch, samples, config.timeout_s)
        except CallError as error:
            reasons = dict.fromkeys(samples, error.reason)
            if len(samples) == 1 or config.on_failure == "stop":
                return reasons
            left_s = deadline - time.monotonic() if process.running else config.timeout_s
            return self._call_each(process, reasons, left_s)
        return self._scoring.record(samples, answer)

    def _call_each(self, process: RewardProcess, failed: Mapping[int, str], left_s: float) -> dict[int, str]:
        """Call with one sample at a time, within `left_s` seconds, since a call with all of them failed."""
        still: dict[int, str] = {}
        for number, (sample, reason) in enumerate(failed.items()):
            alone = range(sample, sample + 1)
            limit_s = max(left_s / min(len(failed) - number, _MOST_SHARES), _LEAST_SHARE_S)
            if left_s < _LEAST_SHARE_S:
                none_left = f"had no time left for sample {sample} alone after it "
                still[sample] = none_left + reason.removeprefix(none_left)
                continue
            if (unloaded := self._load(process, alone)) is not None:
                still |= unloaded
                continue
            started = time.monotonic()
            try:
                still |= self._scoring.record(alone, process.call(self._scoring.batch, alone, limit_s))
            except CallError as error:
                still[sample] = error.reason
            left_s -= time.monotonic() - started
        return still

    def _load(self, process: RewardProcess, samples: range) -> dict[int, str] | None:
        """Load the function. Returns why each of these samples has no number if it cannot be loaded, else None."""
        if not process.running and self._load_left_s <= 0:
            return dict.fromkeys(samples, f"had no time left to be imported again for sample {samples.start}")
        started = time.monotonic()
        try:
            process.load(self._load_left_s)
        except CallError as error:
            return dict.fromkeys(samples, error.reason)
        finally:
            self._load_left_s -= time.monotonic() - started
        return None
