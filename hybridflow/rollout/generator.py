"""Prompts that were drawn, and the responses to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine3d.rollout.config import Sampling
from hybridflow.batch.remote_batch import RemoteBatch
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
    """Lets all engines respond to draws; every sample gets an id of its own and the group of its draw.

    Args:
        rollout: the engines; None in a run without any, which asks for no responses.
        before: called before engines are asked.
        reserve: gives the first of so many ids of samples, where a stream gives ids out too.
    """

    def __init__(
        self,
        rollout: Engines | None,
        before: Callable[[], None] = lambda: None,
        reserve: Callable[[int], int] | None = None,
    ) -> None:
        self._rollout, self._before = rollout, before
        self.reserve = reserve or self._own
        """Gives out the ids of so many samples: the first of them."""
        self.samples_drawn = 0
        """Ids that were given out, unless `reserve` gives them."""

    def _own(self, count: int) -> int:
        first, self.samples_drawn = self.samples_drawn, self.samples_drawn + count
        return first

    def generate(self, draw: Draw, sampling: Sampling, samples_per_prompt: int) -> RemoteBatch:
        """So many responses to each prompt, those to one prompt side by side."""
        return self.begin(draw, sampling, samples_per_prompt).batch()

    def begin(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Future[SampleBatch]:
        """The same as a call whose `batch` the responses are.

        Args:
            draw, sampling, samples_per_prompt: as of `generate`.
            first_sample: id of the first response, where `reserve` has given out the ids before.
        """
        assert self._rollout is not None
        self._before()
        if first_sample is None:
            first_sample = self.reserve(len(draw.indices) * samples_per_prompt)
        drawn = [
            DrawnPrompt(draw.prompts.tokens[index], index, group, first_sample + place * samples_per_prompt)
            for place, (index, group) in enumerate(zip(draw.indices, draw.groups, strict=True))
        ]
        return self._rollout.generate(drawn, sampling=sampling, samples_per_prompt=samples_per_prompt)
