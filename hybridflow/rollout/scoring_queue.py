"""Responses that wait for their score, and go to whoever scores them as soon as one is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from hybridflow.batch.stored_rows import Row
from hybridflow.batch.stream_requests import SampleEnd


class Scorer(Protocol):
    """Whoever scores samples, some at a time."""

    async def score(self, rows: Sequence[Row], prompts: Sequence[int]) -> Sequence[Any]:
        """The score of each, whose prompt has such an index; raises what it failed of."""


class ScoringQueue:
    """Gives each scorer what waits, its part of it if several are free, and again once it is done with that.

    Args:
        scorers: none where nothing is scored.
        scored: called with the ends of samples, and their scores.
        spawn: has something done beside.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        scored: Callable[[Sequence[SampleEnd], Sequence[Any]], Awaitable[None]],
        spawn: Callable[[Any], object],
    ) -> None:
        self._scorers, self._scored, self._spawn = scorers, scored, spawn
        self._free = deque(range(len(scorers)))
        self._waiting: dict[int, tuple[SampleEnd, Row, int]] = {}
        self._being_scored = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._being_scored

    @property
    def needed(self) -> bool:
        """Whether samples are scored."""
        return bool(self._scorers)

    def add(self, end: SampleEnd, row: Row, prompt: int) -> None:
        """Have a sample scored, a response to the prompt of this index."""
        self._waiting[end.sample] = end, row, prompt
        if self._free:
            self._spawn(self._work(self._free.popleft()))

    def forget(self, sample: int) -> None:
        """Do not score a sample any more, unless that has begun."""
        self._waiting.pop(sample, None)

    async def _work(self, scorer: int) -> None:
        while count := -(-len(self._waiting) // (len(self._free) + 1)):
            taken = [self._waiting.pop(sample) for sample in list(islice(self._waiting, count))]
            self._being_scored += count
            scores = await self._scorers[scorer].score([row for _, row, _ in taken], [prompt for *_, prompt in taken])
            self._being_scored -= count
            await self._scored([end for end, *_ in taken], scores)
        self._free.append(scorer)
