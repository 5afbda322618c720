"""How good the policy is on the prompts of evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.preference import PreferenceLoss, Responses
from hybridflow.batch.worker_output import COUNTED
from hybridflow.checkpoint.evaluation_result import Measured, Subject
from hybridflow.data.prompts import Draw
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics
from hybridflow.rewards.result import figure_metrics, reward_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.trainer.role_startup import judging
from hybridflow.trainer.step import Machinery, tell_failures


def evaluate(
    machinery: Machinery, sinks: Metrics, step: int, subject: Subject, others: Mapping[str, float]
) -> Measured:
    """Mean reward of responses to the prompts of evaluation: of the functions, or of the reward model alone.

    Without engines, of the responses that the data have: see `_evaluate_given`.

    Args:
        step: after which the policy is evaluated.
        subject: what is measured, and of what.
        others: figures of the step that stand in the same record.
    """
    if machinery.given is not None:
        loss = load(machinery.recipe.algorithm.name).preference_loss
        assert loss is not None
        return _evaluate_given(machinery, sinks, step, subject, loss)
    machinery.phases.enter("eval")
    recipe, prompts = machinery.recipe, machinery.run.evaluation
    draw = Draw(prompts, range(len(prompts)))
    batch = machinery.generator.generate(draw, recipe.eval_sampling, recipe.trainer.eval_samples)
    values = {metrics.EVAL_PROMPTS: subject.prompts, metrics.EVAL_TRAINING_PROMPTS: subject.learned_from}
    failed: dict[str, float] = {}
    if "reward" in machinery.roles.functions:
        with judging(machinery.roles.judge):
            result = reward_result(machinery.roles.functions["reward"].score(batch, examples=prompts.at(draw.indices)))
        tell_failures(f"step {step}, eval", result)
        failed = {name: value for name, value in reward_metrics(result).items() if name.endswith("/failed")}
        failed |= figure_metrics(result)
        kept = (~result.dropped).nonzero()[:, 0]
        batch, rewards = batch.select(kept), result.total[kept]
    else:
        rewards = machinery.roles.scalar["reward_model"].score(batch.as_generated()).facts()["score"]
    mean = float(rewards.mean())
    sinks.log(step, {subject.metric: mean, **values, **failed, **others}, phase="eval")
    sinks.log_samples(step, machinery.texts(batch, rewards, prompts), phase="eval")
    return Measured(subject, step, mean)


def _evaluate_given(
    machinery: Machinery, sinks: Metrics, step: int, subject: Subject, loss: PreferenceLoss
) -> Measured:
    """How the policy ranks the held-out responses.

    Args:
        step: after which the policy is evaluated.
        subject: what is measured, and of what.
        loss: of the algorithm.
    """
    machinery.phases.enter("eval")
    given = machinery.given
    assert given is not None
    batches = list(given.held_out())
    columns = [
        (given.policy_logprobs(each), *(each.facts[name] for name in ("reference_logprobs", COUNTED, "rewards")))
        for each in batches
    ]
    config = machinery.controllers.config(max(step, 1))
    judged = loss(Responses.of_samples(*map(torch.cat, zip(*columns, strict=True))), config)
    values = {name: float(figure.mean()) for name, figure in judged.values.items() if len(figure)}
    told = {
        metrics.PREFERENCE_LOSS: metrics.EVAL_PREFERENCE_LOSS,
        metrics.PREFERENCE_MARGIN: metrics.EVAL_PREFERENCE_MARGIN,
    }
    figures: dict[str, float] = {
        metrics.EVAL_PROMPTS: subject.prompts,
        metrics.EVAL_TRAINING_PROMPTS: subject.learned_from,
    }
    figures |= {name: values[inner] for inner, name in told.items() if inner in values}
    accuracy = values[metrics.PREFERENCE_ACCURACY]
    sinks.log(step, {subject.metric: accuracy} | figures, phase="eval")
    return Measured(subject, step, accuracy)
