"""Rollouts by one call of all engines: of the current step, or of the next one while the models train."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import Sampling
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.rewards.result import RewardResult
from hybridflow.rollout.buffered_groups import BufferedGroups
from hybridflow.rollout.generator import Generator
from hybridflow.rollout.source import Rollout, RolloutSnapshot, RolloutSource, drawn_event
from hybridflow.workers.future import Future


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of the rollouts of a run.

    Args:
        prompts_per_step: prompts of a step.
        samples_per_prompt: responses to each.
        sampling: distribution that tokens are drawn from.
        max_staleness: steps by which rollout runs ahead: 0 or 1.
        last_step: number of the run's last step.
    """

    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    max_staleness: int
    last_step: int

    @classmethod
    def of(cls, recipe: Recipe) -> BatchPlan:
        """The sizes that a recipe says."""
        trainer, rollout = recipe.trainer, recipe.rollout
        sizes = trainer.prompts_per_step, rollout.samples_per_prompt, rollout.sampling_table
        return cls(*sizes, trainer.max_staleness, trainer.steps)


_Ahead = tuple[Draw, "Future[SampleBatch] | RemoteBatch"]


class BatchSource(RolloutSource):
    """Draws the training prompts of each step and calls all engines; buffers at most one rollout.

    Args:
        plan: sizes of the rollouts.
        prompts: to train on.
        order: of the prompts.
        generator: calls the engines.
    """

    scored_as_they_end = False

    def __init__(self, plan: BatchPlan, prompts: Prompts, order: PromptOrder, generator: Generator) -> None:
        self._plan, self._prompts, self._generator = plan, prompts, generator
        self._sampler = order.sampler()
        self._ahead: _Ahead | None = None
        self._events: list[dict[str, Any]] = []
        self._before_step: tuple[dict[str, Any], int, _Ahead | None] | None = None
        self.drains = plan.max_staleness > 0

    def open(self, version: int, *, steps_left: int) -> None:
        """Engines are asked as prompts are drawn."""

    def close(self) -> None:
        """Calls of engines end with their group."""

    # Groups of a step

    def draw(self, count: int | None = None) -> Draw:
        if count is not None and self._plan.max_staleness:
            raise UserError(f"{count} prompts beside those of the step with trainer.max_staleness, expected 0 of it")
        if self._ahead is not None:
            draw = self._ahead[0]
        else:
            draw = self._next(self._plan.prompts_per_step if count is None else count)
        self._events.append(drawn_event(draw))
        return draw

    def rollout(self, draw: Draw, step: int) -> Rollout:
        """The responses to what `draw` returned; engines then begin the next step's, if they run ahead.

        Raises:
            UserError: other prompts than those that were made ahead.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is not draw:
            raise UserError(
                f"step {step}: responses to other prompts than those that were made ahead, expected "
                "step.generate(step.draw()) once a step with trainer.max_staleness above 0"
            )
        if ahead is None:
            began = time.perf_counter()
            rollout = Rollout(self._begin(draw).batch(), time.perf_counter() - began)
        else:
            rollout = _finished(ahead[1])
        if self._plan.max_staleness and step < self._plan.last_step:
            following = self._next(self._plan.prompts_per_step)
            self._ahead = following, self._begin(following)
        return rollout

    def rewards(self, what: str, sample_ids: Sequence[int]) -> RewardResult | None:
        return None

    def take_metrics(self) -> dict[str, float]:
        return {}

    def take_events(self) -> tuple[dict[str, Any], ...]:
        events, self._events = tuple(self._events), []
        return events

    def trained(self, version: int, rates: Mapping[int, float]) -> None:
        self._before_step = None
        self._sampler.measured(rates)

    # Other prompts

    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Future[SampleBatch]:
        return self._generator.sample(draw, sampling, samples_per_prompt, first_sample)

    def reserve_samples(self, count: int) -> int:
        return self._generator.reserve_samples(count)

    # Weights

    def drain(self) -> None:
        if self._ahead is not None and isinstance(self._ahead[1], Future):
            self._ahead[1].wait()

    def notice_lost(self) -> None:
        """A lost engine ends the run."""

    def change(self, engines: Sequence[int]) -> None:
        """Nothing is sent while weights change."""

    def serve(self, engines: Sequence[int], version: int) -> None:
        """Engines are asked when all serve the same weights."""

    def lose(self, engine: int, cause: str) -> None:
        raise EngineError(f"rollout engine {engine}: {cause}")

    # Checkpoints

    def begin_step(self) -> None:
        self._before_step = self._sampler.state_dict(), self._generator.samples_drawn, self._ahead

    def abandon(self) -> None:
        assert self._before_step is not None
        order, self._generator.samples_drawn, self._ahead = self._before_step
        self._sampler.load_state_dict(order)

    def snapshot(self) -> RolloutSnapshot:
        groups = None
        if self._ahead is not None:
            groups = BufferedGroups.of_batch(_finished(self._ahead[1]).batch.fetch())
        return RolloutSnapshot(self._sampler.state_dict(), self._generator.samples_drawn, groups)

    def restore(self, snapshot: RolloutSnapshot) -> None:
        self._sampler.load_state_dict(snapshot.order)
        self._generator.samples_drawn = snapshot.samples_drawn
        if snapshot.groups is not None and snapshot.groups.ended is not None:
            draws = snapshot.groups.draws
            draw = Draw(self._prompts, list(draws.values()), list(draws))
            self._ahead = draw, RemoteBatch.of(snapshot.groups.ended)

    def unusable(self, groups: BufferedGroups) -> str | None:
        if groups.streamed:
            return "rollout.stream is null now"
        return None if self._plan.max_staleness else "trainer.max_staleness is 0"

    def _next(self, count: int) -> Draw:
        drawn = self._sampler.draw(count)
        return Draw(self._prompts, [index for _, index in drawn], [number for number, _ in drawn])

    def _begin(self, draw: Draw) -> Future[SampleBatch]:
        return self._generator.sample(draw, self._plan.sampling, self._plan.samples_per_prompt)


def _finished(responses: Future[SampleBatch] | RemoteBatch) -> Rollout:
    if not isinstance(responses, Future):
        return Rollout(responses, None)
    batch = responses.batch()
    return Rollout(batch, max(span.end for span in responses.spans) - min(span.begin for span in responses.spans))
