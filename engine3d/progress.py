"""Progress of this process, for watchers: slow code counts the batches that are done.

A batch is a micro-batch, or a batch of an engine. A process without one for long has stalled, however busy it looks: a
rank that waits for another on a GPU keeps its core busy.
"""

from __future__ import annotations

import time


class BatchProgress:
    """Batches of one call after another. One thread counts, another may read."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a call."""
        self.batches = 0
        """Batches that are done of it."""
        self.unit = ""
        """Unit of `done`, such as "responses"; empty if unknown."""
        self.done, self.total = 0, 0
        """Units that are done, and their total; 0 if unknown."""
        self.at = time.monotonic()
        """Time of the last batch, or of the begin of the call, by the monotonic clock."""
        self._longest_s = 0.0

    def count(self, unit: str, total: int = 0) -> None:
        """Set the unit that is counted from here on, and its total; 0 if unknown."""
        self.unit, self.done, self.total = unit, 0, total

    def batch_done(self) -> None:
        """Count a batch."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self.at)
        self.batches, self.at = self.batches + 1, now

    @property
    def longest_pause_s(self) -> float:
        """Longest time without a batch so far, in seconds."""
        return max(self._longest_s, time.monotonic() - self.at)


progress = BatchProgress()
"""Progress of this process."""
