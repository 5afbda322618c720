"""How far this process is in what it does, for who watches it: code that takes its time counts the parts that are done.

A part is a micro-batch, or a batch of an engine. Who sees that none was done for long knows that the process stands
still, however busy it looks: a rank that waits for another on a GPU keeps its core busy.
"""

from __future__ import annotations

import time


class Progress:
    """The parts of one piece of work after another. One thread counts, another may look."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A piece of work begins."""
        self.parts = 0
        """Parts that are done of it."""
        self.unit = ""
        """Name of what is counted, such as "responses"; empty where nothing has said so."""
        self.done, self.total = 0, 0
        """Units that are done, of a total; 0 where it is not known."""
        self.at = time.monotonic()
        """When the last one was done, or the work began, by the monotonic clock."""
        self._longest_s = 0.0

    def count(self, unit: str, total: int = 0) -> None:
        """Name what is counted from here on, and how many there will be; 0 where that is not known."""
        self.unit, self.done, self.total = unit, 0, total

    def part_done(self) -> None:
        """One more is done."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self.at)
        self.parts, self.at = self.parts + 1, now

    @property
    def longest_pause_s(self) -> float:
        """Without a part, in seconds, so far."""
        return max(self._longest_s, time.monotonic() - self.at)


progress = Progress()
"""That of this process."""
