"""Responses that the data have, in place of engines, and the measurement of those that are held out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine3d.errors import UserError
from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.losses.preference import ResponsePairs
from hybridflow.algorithms.preferences import PAIR, sequence_logprobs
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.worker_output import LOSS_TOKENS
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import PREFERENCE, PREFERENCE_LOSS, PREFERENCE_MARGIN
from hybridflow.roles.groups import PolicyGroup

_TRAIN, _HELD_OUT = "train", "evaluation"


class GivenSource:
    """The responses of a run's data as batches, with what the reference policy says of them.

    The reference is the actor before its first update: `measure` asks it once for every response, and keeps one figure
    for each, which are part of a checkpoint.

    Args:
        algorithm: whose loss compares responses.
        temperature: of the log-probs.
        prompts_per_step: prompts of one call at most, but for one for each data-parallel rank.
        train, held_out: prompts of training and evaluation; those are used that are `GivenResponses`.
        actor: the ranks that train.
    """

    def __init__(
        self,
        algorithm: AlgorithmSettings,
        temperature: float,
        prompts_per_step: int,
        train: Prompts,
        held_out: Prompts | None,
        actor: PolicyGroup,
    ) -> None:
        phases = {_TRAIN: train, _HELD_OUT: held_out}
        self._phases = {name: prompts for name, prompts in phases.items() if isinstance(prompts, GivenResponses)}
        self._algorithm, self._temperature, self._actor = algorithm, temperature, actor
        self._prompts_per_step = prompts_per_step
        self._reference: dict[str, Tensor] = {}

    def measure(self) -> None:
        """Compute the log-probs of all responses by the actor as it is: those of the reference policy."""
        began = time.perf_counter()
        for name, given in self._phases.items():
            chunks = [self.policy_logprobs(_batch(given, rows, rows)) for rows in self._ranges(len(given))]
            self._reference[name] = torch.cat(chunks).view(-1, PAIR)
        count = PAIR * sum(map(len, self._phases.values()))
        log.info(f"reference: log-probs of {count:,} responses in {time.perf_counter() - began:.1f} s")

    def batch(self, draw: Draw, first_sample: int) -> RemoteBatch:
        """Two samples to each training prompt that was drawn, side by side.

        Args:
            draw: some of the training prompts.
            first_sample: id of the first sample; the others follow.
        """
        return self._with_per_sample(_TRAIN, draw.indices, draw.groups, first_sample)

    def held_out(self) -> Iterator[RemoteBatch]:
        """The same of all held-out prompts, in parts."""
        for rows in self._ranges(len(self._phases[_HELD_OUT])):
            yield self._with_per_sample(_HELD_OUT, rows, rows, PAIR * rows[0])

    def policy_logprobs(self, batch: RemoteBatch) -> Tensor:
        """(B,) float64: log-prob of each whole response by the actor as it is."""
        columns = self._actor.logprobs(batch, temperature=self._temperature)
        batch = batch.with_columns(current_logprobs=columns)
        output = self._actor.apply(batch, function=sequence_logprobs, arguments={"config": self._algorithm})
        return output.per_sample()["policy"]

    def state_dict(self) -> dict[str, Tensor]:
        """The reference's log-probs, (n, 2) float64 for each phase; none before `measure`."""
        return {self._kept_as(name): column for name, column in self._reference.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            UserError: it is of other pairs.
        """
        for name, given in self._phases.items():
            column = state.get(self._kept_as(name))
            if column is None or tuple(column.shape) != (len(given), PAIR):
                size = "none" if column is None else f"those of {len(column):,}"
                raise UserError(
                    f"resume: of the {len(given):,} {name} examples the checkpoint has the reference's log-probs of "
                    f"{size}; expected the previous data, evaluation.eval.prompts and kind of algorithm"
                )
            self._reference[name] = column

    def _kept_as(self, phase: str) -> str:
        """Name of a column in a checkpoint: unpaired examples have other second responses than pairs."""
        kind = "example" if self._algorithm.unpaired else "pair"
        return f"reference.{phase}.{kind}"

    def _ranges(self, count: int) -> list[range]:
        """Consecutive examples, as many at once as a step has, and at least one for each data-parallel rank."""
        most = max(self._prompts_per_step, self._actor.layout.dp)
        return even_ranges(count, max(1, count // most))

    def _with_per_sample(
        self, phase: str, rows: Sequence[int], groups: Sequence[int], first_sample: int
    ) -> RemoteBatch:
        given = self._phases[phase]
        batch = _batch(given, rows, groups, first_sample)
        rewards = torch.tensor([given.rewards[row] for row in rows], dtype=torch.float32)
        reference = self._reference[phase][torch.as_tensor(rows)]
        return batch.with_per_sample(rewards=rewards.flatten(), reference_logprobs=reference.flatten())


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


_FIGURES = {
    PREFERENCE: metrics.PREFERENCE_ACCURACY,
    PREFERENCE_LOSS: metrics.PREFERENCE_LOSS,
    PREFERENCE_MARGIN: metrics.PREFERENCE_MARGIN,
}


@dataclass(frozen=True)
class PairMeasurer:
    """Measures how the policy ranks the held-out responses.

    Args:
        given: responses that the data have.
        controllers: of the algorithm's coefficients.
    """

    given: GivenSource
    controllers: Controllers

    def measure(self, step: int, *, identity: str, training_prompts: int) -> MeasuredSet:
        """Measure the policy's ranking of the responses.

        Args:
            step: after which the policy is evaluated.
            identity: of the set.
            training_prompts: how many of its prompts the model trains on too.
        """
        config = self.controllers.config(max(step, 1))
        loss = load(config.name).preference_loss
        assert loss is not None
        batches = list(self.given.held_out())
        columns = [
            (
                self.given.policy_logprobs(batch),
                *(batch.per_sample[name] for name in ("reference_logprobs", LOSS_TOKENS, "rewards")),
            )
            for batch in batches
        ]
        judged = loss(ResponsePairs.of_samples(*map(torch.cat, zip(*columns, strict=True))), config)
        values = {name: float(figure.mean()) for name, figure in judged.values.items() if len(figure)}
        measured = {name: values[inner] for name, inner in _FIGURES.items() if inner in values}
        prompts = sum(map(len, batches)) // PAIR
        measured |= {metrics.SET_PROMPTS: prompts, metrics.SET_TRAINING: training_prompts}
        return MeasuredSet(identity, PREFERENCE, step, prompts, PAIR, measured)
