"""The rollout of the next step, which the engines make while the models learn from that of this one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine3d.errors import UserError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.data.sampler import PromptSampler
from hybridflow.rollout.generator import Generator
from hybridflow.workers.future import Future


@dataclass(frozen=True)
class Rollout:
    """Responses to a draw.

    Args:
        batch: the samples.
        seconds: that they took; None of what was restored.
    """

    batch: RemoteBatch
    seconds: float | None


class Lookahead:
    """Draws the training prompts of each step and lets the engines respond; holds at most one rollout for later.

    Args:
        recipe: with `trainer.max_staleness`, the number of steps by which rollout runs ahead.
        prompts: to learn from.
        sampler: draws them.
        generator: has the engines.
    """

    def __init__(self, recipe: Recipe, prompts: Prompts, sampler: PromptSampler, generator: Generator) -> None:
        self._recipe, self._prompts, self._sampler, self._generator = recipe, prompts, sampler, generator
        self._ahead: tuple[Draw, Future[SampleBatch] | RemoteBatch] | None = None

    def draw(self, count: int | None = None) -> Draw:
        """The prompts of this step, or so many further ones; with `trainer.max_staleness` there are no others.

        Raises:
            UserError: other prompts are asked for with `trainer.max_staleness`.
        """
        if count is not None and self._recipe.trainer.max_staleness:
            raise UserError(f"{count} prompts beside those of the step with trainer.max_staleness, expected 0 of it")
        if self._ahead is not None:
            return self._ahead[0]
        return self._next(self._recipe.trainer.prompts_per_step if count is None else count)

    def rollout(self, draw: Draw, step: int) -> Rollout:
        """The responses to what `draw` gave; the engines then begin with the next step's, if they are to run ahead.

        Raises:
            UserError: they have been made ahead, to other prompts.
        """
        held, self._ahead = self._ahead, None
        if held is not None and held[0] is not draw:
            raise UserError(
                f"step {step}: responses to other prompts than those that were made ahead, expected "
                "step.generate(step.draw()) once a step with trainer.max_staleness above 0"
            )
        if held is None:
            began = time.perf_counter()
            found = Rollout(self._begin(draw).batch(), time.perf_counter() - began)
        else:
            found = _finished(held[1])
        if self._recipe.trainer.max_staleness and step < self._recipe.trainer.steps:
            following = self._next(self._recipe.trainer.prompts_per_step)
            self._ahead = following, self._begin(following)
        return found

    def wait(self) -> None:
        """Until the engines are at nothing. Raises what went wrong there."""
        if self._ahead is not None and isinstance(self._ahead[1], Future):
            self._ahead[1].wait()

    def held(self) -> tuple[RemoteBatch, ...]:
        """What is held for later steps, once the engines are done with it; it stays where it is."""
        return (_finished(self._ahead[1]).batch,) if self._ahead is not None else ()

    def restore(self, held: tuple[SampleBatch, ...]) -> None:
        """Go on with what `state` gave."""
        for batch in held:
            groups = dict(zip(batch.group_ids.tolist(), batch.prompt_indices.tolist(), strict=True))
            self._ahead = Draw(self._prompts, list(groups.values()), list(groups)), RemoteBatch.of(batch)

    def _next(self, count: int) -> Draw:
        drawn = self._sampler.draw(count)
        return Draw(self._prompts, [index for _, index in drawn], [number for number, _ in drawn])

    def _begin(self, draw: Draw) -> Future[SampleBatch]:
        rollout = self._recipe.rollout
        return self._generator.begin(draw, rollout.sampling_table, rollout.samples_per_prompt)


def _finished(made: Future[SampleBatch] | RemoteBatch) -> Rollout:
    if not isinstance(made, Future):
        return Rollout(made, None)
    batch = made.batch()
    return Rollout(batch, max(span.end for span in made.spans) - min(span.begin for span in made.spans))
