"""Responses that wait for a score, and are sent to the first free scorer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from hybridflow.batch.stream_requests import SampleEnd, StoredRow


class Scorer(Protocol):
    """A scorer of samples, some at a time."""

    async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> Sequence[Any]:
        """The score of each sample. `prompts`: index of the prompt of each. Raises its error."""


class ScoringQueue:
    """Waiting samples, sent to scorers as soon as one may have more: a share to each idle scorer, else all of them to
    the one with the fewest batches.

    Args:
        scorers: none where nothing is scored.
        at_once: batches that each may have at a time.
        scored: called with the ends of samples, and their scores.
        spawn: starts a task.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        at_once: int,
        scored: Callable[[Sequence[SampleEnd], Sequence[Any]], Awaitable[None]],
        spawn: Callable[[Any], object],
    ) -> None:
        self._scorers, self._at_once, self._scored, self._spawn = scorers, at_once, scored, spawn
        self._batches = [0] * len(scorers)
        self._waiting: dict[int, tuple[SampleEnd, int]] = {}
        self._dealing = False
        self._being_scored = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._being_scored

    @property
    def needed(self) -> bool:
        """True if samples are scored."""
        return bool(self._scorers)

    def add(self, end: SampleEnd, prompt: int) -> None:
        """Queue a sample for scoring: a response to the prompt of this index."""
        self._waiting[end.sample] = end, prompt
        if not self._dealing:  # together with what is added at the same time
            self._dealing = True
            self._spawn(self._deal_added())

    def forget(self, sample: int) -> None:
        """Remove a sample from the queue. One that is being scored continues."""
        self._waiting.pop(sample, None)

    async def _deal_added(self) -> None:
        self._dealing = False
        self._deal()

    def _deal(self) -> None:
        fewest = min(self._batches)
        if fewest >= self._at_once:
            return
        takers = [scorer for scorer, batches in enumerate(self._batches) if batches == fewest]
        takers = takers if fewest == 0 else takers[:1]
        for left, scorer in zip(range(len(takers), 0, -1), takers, strict=True):
            if count := -(-len(self._waiting) // left):
                taken = [self._waiting.pop(sample) for sample in list(islice(self._waiting, count))]
                self._batches[scorer] += 1
                self._being_scored += count
                self._spawn(self._score(scorer, taken))

    async def _score(self, scorer: int, taken: Sequence[tuple[SampleEnd, int]]) -> None:
        rows = [end.stored_row for end, _ in taken]
        scores = await self._scorers[scorer].score(rows, [prompt for _, prompt in taken])
        self._batches[scorer] -= 1
        self._being_scored -= len(taken)
        self._deal()
        await self._scored([end for end, _ in taken], scores)
