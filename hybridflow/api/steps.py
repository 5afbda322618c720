"""A step of an algorithm in two halves: the rollouts, and the updates that learn from them."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.data.prompts import Draw
from hybridflow.trainer.step import Step


@dataclass
class RolloutStep(Step):
    """Goes as far as the algorithm's updates, and keeps what they would learn from."""

    greedy: RemoteBatch | None = None
    """The baselines of an algorithm that has them."""
    moments: Moments | None = None
    """Of the advantages, where they are to be whitened."""
    _samples: RemoteBatch | None = None

    @property
    def samples(self) -> RemoteBatch:
        """What the updates would learn from, once the algorithm has come there."""
        assert self._samples is not None
        return self._samples

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False) -> RemoteBatch:
        scored = super().rewards(batch, baseline=baseline)
        if baseline:
            self.greedy = scored
        return scored

    def update(self, batch: RemoteBatch, *, whiten: Moments | None = None) -> None:
        """No update."""
        self._wait_for_columns()
        self._samples, self.moments = batch, whiten


@dataclass
class GivenStep(Step):
    """Learns from given samples: their responses, log-probs, values and rewards are there, their advantages are not."""

    samples: RemoteBatch | None = None
    greedy: RemoteBatch | None = None

    def draw(self) -> Draw:
        """Of prompts that were drawn already."""
        return Draw(self.machinery.run.train, ())

    def generate(self, draw: Draw) -> RemoteBatch:
        assert self.samples is not None
        return self.samples

    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        assert self.greedy is not None
        return self.greedy

    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        return batch

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        return batch

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False) -> RemoteBatch:
        return batch
