"""Replay buffer of samples, in the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_batch import SampleBatch

if TYPE_CHECKING:
    from torch import Generator, Tensor

_TOKEN_BYTES = 8 + 4 + 1
"""Bytes of a response token: its id, its log-prob and its mask. A prompt token has its id alone."""
_SAMPLE_BYTES = 8 * 8
"""Bytes of a sample: lengths, ids, version, finish reason and reward."""


class ReplayBuffer:
    """Samples of earlier steps, as their policies drew them: tokens, log-probs and rewards, in order of their ids.

    It is in the driver's memory. A sample is removed when it is drawn, when it is too old, or when the buffer is over
    capacity: then the samples of the smallest ids, which are the oldest.

    Args:
        size: the most samples.
        max_age: most versions between the weights that drew a sample and those that generate; any if None.
    """

    def __init__(self, size: int, max_age: int | None = None) -> None:
        self._size, self._max_age = size, max_age
        self.samples: SampleBatch | None = None
        """None where there are none. Never changed in place."""

    def __len__(self) -> int:
        return len(self.samples) if self.samples is not None else 0

    def drop_older(self, version: int) -> None:
        """Remove the samples that are too old compared with weights of this version."""
        if self.samples is not None and self._max_age is not None:
            self._keep(version - self.samples.policy_versions <= self._max_age)

    def take(self, count: int, generator: Generator) -> SampleBatch | None:
        """Draw and remove `count` samples, or all if there are fewer: uniformly, without replacement.

        Returns:
            The samples in order of their ids; None for none.
        """
        count = min(count, len(self))
        if not count:
            return None
        assert self.samples is not None
        drawn = torch.zeros(len(self), dtype=torch.bool)
        drawn[torch.randperm(len(self), generator=generator)[:count]] = True
        taken = self.samples.select(drawn.nonzero()[:, 0])
        self._keep(~drawn)
        return taken

    def add(self, samples: SampleBatch) -> None:
        """Add samples, whose ids are larger than those of all in the buffer. The oldest are removed for them."""
        joined = samples if self.samples is None else SampleBatch.concatenate([self.samples, samples])
        first = max(0, len(joined) - self._size)
        self.samples = joined.select(range(first, len(joined))) if first else joined
        if not len(self.samples):
            self.samples = None

    def restore(self, samples: SampleBatch | None) -> None:
        """Restore `samples`. The oldest are removed where the buffer is smaller now."""
        self.samples = None
        if samples is not None:
            self.add(samples.with_origins())

    def _keep(self, kept: Tensor) -> None:
        assert self.samples is not None
        if not bool(kept.all()):
            self.samples = self.samples.select(kept.nonzero()[:, 0]) if bool(kept.any()) else None


def most_bytes(samples: int, sequence_tokens: int) -> int:
    """Return the most host memory of `samples` kept samples of at most `sequence_tokens` tokens each."""
    return samples * (sequence_tokens * _TOKEN_BYTES + _SAMPLE_BYTES)
