"""Processes of one reward function, shared by the batches that are scored at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridflow.rewards.processes.handle import KilledError, RewardProcess


class ProcessPool:
    """Leases a process to each call. For any number of threads.

    Args:
        processes: of one function.
    """

    def __init__(self, processes: Sequence[RewardProcess]) -> None:
        self.processes = tuple(processes)
        self._free = deque(self.processes)
        self._changed = threading.Condition()
        self._killed = False

    @contextmanager
    def taken(self) -> Iterator[RewardProcess]:
        """Lease a process for the block, once one is free.

        Raises:
            KilledError: `kill` was called, and `close` not since.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._killed)
            if self._killed:
                raise KilledError
            process = self._free.popleft()
        try:
            yield process
        finally:
            with self._changed:
                self._free.append(process)
                self._changed.notify()

    def kill(self) -> None:
        """Kill every process, from any thread; calls in flight and those that wait raise KilledError."""
        with self._changed:
            self._killed = True
            self._changed.notify_all()
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Wait for the end of every process; the next call starts them again. No call may be in flight."""
        for process in self.processes:
            process.close()
        with self._changed:
            self._killed = False
