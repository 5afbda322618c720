"""The contract of every sample that is trained on, checked before each optimizer step.

- It ended by itself: a response that was given up, or lost with its engine, is never trained on.
- The weights that drew its tokens are those that the engines serve, or at most `trainer.max_staleness` versions older.
- Its prompt's draw was not trained on in an earlier step, unless the algorithm keeps samples and asked for it again.

That each token has a log-prob and the version of the forward pass which drew it, batches hold by their construction
(`SampleBatch.from_generations`); that an engine serves no version in part, `RolloutEngine` does.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.config.run import TrainerConfig


class Numbers:
    """A set of numbers that are nearly all there from 0 on, as ranges."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        index = bisect.bisect_right(self._begins, number) - 1
        return index >= 0 and number < self._ends[index]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First number, and the one after the last, of each range."""
        return list(zip(self._begins, self._ends, strict=True))

    def add(self, begin: int, end: int) -> None:
        """Add the numbers from `begin` up to `end`, without it."""
        if begin >= end:
            return
        first = bisect.bisect_left(self._ends, begin)
        last = bisect.bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]


class Contract:
    """Refuses samples that must not be trained on.

    Args:
        max_staleness: by how many versions their weights may be older than those that are served.
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._learned = Numbers()

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Contract:
        """The contract of a run with these settings."""
        return cls(trainer.max_staleness)

    @property
    def allows_older(self) -> bool:
        """True if a step may train on samples of older weights than those that are served."""
        return self._max_staleness > 0

    def begin(self, drawn: int, ahead: Iterable[int]) -> None:
        """Mark the draws before `drawn` as trained on or dropped, but for those that are `ahead`."""
        begin = 0
        for number in sorted(set(ahead)):
            self._learned.add(begin, min(number, drawn))
            begin = number + 1
        self._learned.add(begin, drawn)

    def check(self, batch: RemoteBatch, *, step: int, serving: int, recalled: frozenset[int] = frozenset()) -> None:
        """Check a batch before a step trains on it.

        Args:
            batch: to train on.
            step: its number.
            serving: version of the weights that the engines serve.
            recalled: ids of the samples that an earlier step has trained on, and the algorithm has kept.

        Raises:
            EngineError: naming the first sample that must not be trained on, and why.
        """
        per_sample = batch.per_sample
        fresh = torch.tensor([sample not in recalled for sample in per_sample["sample_ids"].tolist()], dtype=torch.bool)
        versions = per_sample["policy_versions"]
        newest = per_sample.get("newest_versions", versions)
        oldest = serving - self._max_staleness
        for wrong, why in (
            (per_sample["finish_reasons"] == FinishReason.ABORT, "was given up before its end"),
            (newest > serving, f"is of weights that no engine serves yet; they serve version {serving}"),
            (
                fresh & (versions < oldest),
                f"is of weights older than version {oldest}, the oldest that it may train on",
            ),
        ):
            if bool(wrong.any()):
                raise self._breach(batch, int(wrong.nonzero()[0]), step, why)
        for row, (group, new) in enumerate(zip(per_sample["group_ids"].tolist(), fresh.tolist(), strict=True)):
            if new and group in self._learned:
                raise self._breach(batch, row, step, "was trained on in an earlier step")

    def learned(self, batch: RemoteBatch) -> None:
        """Mark the draws of a batch as trained on, once its step is over."""
        for group in batch.per_sample["group_ids"].unique().tolist():
            self._learned.add(group, group + 1)

    @staticmethod
    def _breach(batch: RemoteBatch, row: int, step: int, why: str) -> EngineError:
        ids = {name: int(batch.per_sample[name][row]) for name in ("sample_ids", "group_ids", "policy_versions")}
        return EngineError(
            f"step {step}: sample {ids['sample_ids']} of draw {ids['group_ids']}, made by version "
            f"{ids['policy_versions']} of the weights, {why}; the batch was not trained on"
        )
