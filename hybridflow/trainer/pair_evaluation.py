"""Measurement of a held-out set where no engines run: of the responses that the data have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.algorithms.config import load
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.losses.preference import Responses
from hybridflow.algorithms.preferences import PAIR
from hybridflow.batch.worker_output import COUNTED
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import PREFERENCE, PREFERENCE_LOSS, PREFERENCE_MARGIN
from hybridflow.trainer.given_responses import GivenSource

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
                self.given.policy_logprobs(each),
                *(each.facts[name] for name in ("reference_logprobs", COUNTED, "rewards")),
            )
            for each in batches
        ]
        judged = loss(Responses.of_samples(*map(torch.cat, zip(*columns, strict=True))), config)
        values = {name: float(figure.mean()) for name, figure in judged.values.items() if len(figure)}
        figures = {name: values[inner] for name, inner in _FIGURES.items() if inner in values}
        prompts = sum(map(len, batches)) // PAIR
        figures |= {metrics.SET_PROMPTS: prompts, metrics.SET_TRAINING: training_prompts}
        return MeasuredSet(identity, PREFERENCE, step, prompts, PAIR, figures)
