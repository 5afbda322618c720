"""Responses of all engines to prompts in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine3d.rollout.config import Sampling
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.data.prompts import Draw, DrawnPrompt
from hybridflow.workers.future import Future


class Engines(Protocol):
    """The group of the engines, as far as a generator needs it."""

    @property
    def generate(self) -> Generate:
        """The call of all engines."""


class Generate(Protocol):
    """Responses to prompts; see `RolloutWorker.generate`."""

    def __call__(
        self, drawn: list[DrawnPrompt], /, *, sampling: Sampling, samples_per_prompt: int
    ) -> Future[SampleBatch]: ...


class Generator:
    """Asks all engines for responses; every sample gets an id of its own and the group of its draw.

    Args:
        rollout: the engines; None in a run without any, which asks for no responses.
        before: called before engines are asked.
    """

    def __init__(self, rollout: Engines | None, before: Callable[[], None] = lambda: None) -> None:
        self._rollout, self._before = rollout, before
        self.samples_drawn = 0
        """Sample ids that were given out here."""

    def reserve_samples(self, count: int) -> int:
        """Give out `count` sample ids. Returns the first of them."""
        first, self.samples_drawn = self.samples_drawn, self.samples_drawn + count
        return first

    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Future[SampleBatch]:
        """See `Samples.sample`."""
        assert self._rollout is not None
        self._before()
        if first_sample is None:
            first_sample = self.reserve_samples(len(draw.indices) * samples_per_prompt)
        drawn = [
            DrawnPrompt(draw.prompts.tokens[index], index, group, first_sample + row * samples_per_prompt)
            for row, (index, group) in enumerate(zip(draw.indices, draw.groups, strict=True))
        ]
        return self._rollout.generate(drawn, sampling=sampling, samples_per_prompt=samples_per_prompt)
