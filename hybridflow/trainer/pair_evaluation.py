"""Measurement of a held-out set where no engines run: of the responses that the data have."""

from __future__ import annotations

import torch

from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.preference import Responses
from hybridflow.algorithms.preferences import PAIR
from hybridflow.batch.worker_output import COUNTED
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import PREFERENCE, PREFERENCE_LOSS, PREFERENCE_MARGIN
from hybridflow.trainer.step import Machinery

_FIGURES = {
    PREFERENCE: metrics.PREFERENCE_ACCURACY,
    PREFERENCE_LOSS: metrics.PREFERENCE_LOSS,
    PREFERENCE_MARGIN: metrics.PREFERENCE_MARGIN,
}


def measure_pairs(machinery: Machinery, step: int, *, identity: str, training_prompts: int) -> MeasuredSet:
    """Have the policy rank the held-out responses.

    Args:
        machinery: of the run.
        step: after which the policy is evaluated.
        identity: of the set.
        training_prompts: how many of its prompts the model learns from too.
    """
    given, loss = machinery.given, load(machinery.recipe.algorithm.name).preference_loss
    assert given is not None and loss is not None
    batches = list(given.held_out())
    columns = [
        (given.policy_logprobs(each), *(each.facts[name] for name in ("reference_logprobs", COUNTED, "rewards")))
        for each in batches
    ]
    config = machinery.controllers.config(max(step, 1))
    judged = loss(Responses.of_samples(*map(torch.cat, zip(*columns, strict=True))), config)
    values = {name: float(figure.mean()) for name, figure in judged.values.items() if len(figure)}
    figures = {name: values[inner] for name, inner in _FIGURES.items() if inner in values}
    prompts = sum(map(len, batches)) // PAIR
    figures |= {metrics.SET_PROMPTS: prompts, metrics.SET_TRAINING: training_prompts}
    return MeasuredSet(identity, PREFERENCE, step, prompts, PAIR, figures)
