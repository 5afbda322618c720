"""In the place of engines in a run without them: responses that the data have."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine3d.errors import UserError
from hybridflow.algorithms.preferences import PAIR, sequence_logprobs
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.config.recipe import Recipe
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.prompts import Draw
from hybridflow.errors.log import log
from hybridflow.metrics.names import EVAL
from hybridflow.roles.groups import PolicyGroup
from hybridflow.trainer.run_setup import Run

_HELD_OUT = "evaluation"


class GivenSource:
    """The responses of a run's data as batches, with what the reference policy says of them.

    The reference is the actor before its first update: `measure` asks it once for every response, and keeps one figure
    for each, which are part of a checkpoint.

    Args:
        recipe: of the run.
        run: whose prompts are `GivenResponses`.
        actor: the ranks that train.
    """

    def __init__(self, recipe: Recipe, run: Run, actor: PolicyGroup) -> None:
        phases = {"train": run.train, _HELD_OUT: run.sets.get(EVAL)}
        self._phases = {name: each for name, each in phases.items() if isinstance(each, GivenResponses)}
        self._recipe, self._actor = recipe, actor
        self._reference: dict[str, Tensor] = {}

    def measure(self) -> None:
        """Have the actor, as it is, say the log-probs of all responses: those of the reference policy."""
        began = time.perf_counter()
        for name, given in self._phases.items():
            parts = [self.policy_logprobs(_batch(given, rows, rows)) for rows in self._parts(len(given))]
            self._reference[name] = torch.cat(parts).view(-1, PAIR)
        count = PAIR * sum(map(len, self._phases.values()))
        log.info(f"reference: log-probs of {count:,} responses in {time.perf_counter() - began:.1f} s")

    def batch(self, draw: Draw, first_sample: int) -> RemoteBatch:
        """Two samples to each prompt that was drawn of those to learn from, side by side.

        Args:
            draw: some of the training prompts.
            first_sample: id of the first sample; the others follow.
        """
        return self._with_facts("train", draw.indices, draw.groups, first_sample)

    def held_out(self) -> Iterator[RemoteBatch]:
        """The same of all held-out prompts, in parts."""
        for rows in self._parts(len(self._phases[_HELD_OUT])):
            yield self._with_facts(_HELD_OUT, rows, rows, PAIR * rows[0])

    def policy_logprobs(self, batch: RemoteBatch) -> Tensor:
        """(B,) float64: log-prob of each whole response by the actor as it is."""
        temperature = self._recipe.rollout.sampling.temperature
        batch = batch.with_columns(current_logprobs=self._actor.logprobs(batch, temperature=temperature))
        found = self._actor.apply(batch, function=sequence_logprobs, arguments={"config": self._recipe.algorithm})
        return found.facts()["policy"]

    def state_dict(self) -> dict[str, Tensor]:
        """The reference's log-probs, (n, 2) float64 for each phase; none before `measure`."""
        return {self._kept_as(name): column for name, column in self._reference.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state_dict` gave.

        Raises:
            UserError: it is of other pairs.
        """
        for name, given in self._phases.items():
            column = state.get(self._kept_as(name))
            if column is None or tuple(column.shape) != (len(given), PAIR):
                found = "none" if column is None else f"those of {len(column):,}"
                raise UserError(
                    f"resume: of the {len(given):,} {name} examples the checkpoint has the reference's log-probs of "
                    f"{found}; expected the data, evaluation.eval.prompts and kind of algorithm of before"
                )
            self._reference[name] = column

    def _kept_as(self, phase: str) -> str:
        """Examples of one response each have others beside them than pairs have."""
        kind = "example" if self._recipe.unpaired else "pair"
        return f"reference.{phase}.{kind}"

    def _parts(self, count: int) -> list[range]:
        """Consecutive examples, as many at once as a step has, and at least one for each data-parallel rank."""
        most = max(self._recipe.trainer.prompts_per_step, self._actor.layout.dp)
        return even_ranges(count, max(1, count // most))

    def _with_facts(self, phase: str, rows: Sequence[int], groups: Sequence[int], first_sample: int) -> RemoteBatch:
        given = self._phases[phase]
        batch = _batch(given, rows, groups, first_sample)
        rewards = torch.tensor([given.rewards[row] for row in rows], dtype=torch.float32)
        reference = self._reference[phase][torch.as_tensor(rows)]
        return batch.with_facts(rewards=rewards.flatten(), reference_logprobs=reference.flatten())


def _batch(given: GivenResponses, rows: Sequence[int], groups: Sequence[int], first_sample: int = 0) -> RemoteBatch:
    """Both responses to each of some prompts, side by side; no engine has said how likely they are."""
    responses = [response for row in rows for response in given.responses[row]]
    return RemoteBatch.of(
        SampleBatch.from_generations(
            prompts=[given.tokens[row] for row in rows for _ in range(PAIR)],
            responses=responses,
            logprobs=[[0.0] * len(response) for response in responses],
            sample_ids=range(first_sample, first_sample + len(responses)),
            group_ids=[group for group in groups for _ in range(PAIR)],
            prompt_indices=[row for row in rows for _ in range(PAIR)],
            policy_versions=[0] * len(responses),
            finish_reasons=[FinishReason.STOP] * len(responses),
        )
    )
