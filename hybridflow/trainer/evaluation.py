"""How good the policy is on the prompts of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.preference import Responses
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import COUNTED
from hybridflow.checkpoint.evaluation_result import Measured, Subject
from hybridflow.data.prompts import Draw
from hybridflow.metrics import names as metrics
from hybridflow.metrics.sample_file import SampleText
from hybridflow.rewards.result import check_given, figure_metrics, reward_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.trainer.role_startup import judging
from hybridflow.trainer.step import Machinery, tell_failures
from hybridflow.workers.future import Future


@dataclass(frozen=True)
class Evaluation:
    """What was measured on the prompts of evaluation.

    Args:
        measured: the value.
        values: all figures, by metric name.
        texts: some of the responses.
    """

    measured: Measured
    values: dict[str, float]
    texts: Sequence[SampleText] = ()


def begin_evaluation(machinery: Machinery, first_sample: int | None = None) -> Future[SampleBatch]:
    """Let the engines respond to the prompts of evaluation; `first_sample` as of `Samples.sample`."""
    recipe, prompts = machinery.recipe, machinery.run.evaluation
    draw = Draw(prompts, range(len(prompts)), range(len(prompts)))
    return machinery.source.sample(draw, recipe.eval_sampling, recipe.trainer.eval_samples, first_sample)


def evaluate_responses(machinery: Machinery, batch: RemoteBatch, step: int, subject: Subject) -> Evaluation:
    """Mean reward of responses to the prompts of evaluation: of the functions, or of the reward model alone.

    Args:
        batch: the responses of `begin_evaluation`.
        step: after which the policy is evaluated.
        subject: what is measured, and of what.
    """
    prompts = machinery.run.evaluation
    values = {metrics.EVAL_PROMPTS: subject.prompts, metrics.EVAL_TRAINING_PROMPTS: subject.learned_from}
    failed: dict[str, float] = {}
    if "reward" in machinery.roles.functions:
        examples = prompts.at(range(len(prompts)))
        with judging(machinery.roles.judge):
            result = reward_result(machinery.roles.functions["reward"].score(batch, examples=examples))
        check_given(result, machinery.recipe.functions["reward"].functions)
        tell_failures(f"step {step}, eval", result)
        failed = {name: value for name, value in reward_metrics(result).items() if name.endswith("/failed")}
        failed |= figure_metrics(result)
        kept = (~result.dropped).nonzero()[:, 0]
        batch, rewards = batch.select(kept), result.total[kept]
    else:
        rewards = machinery.roles.scalar["reward_model"].score(batch.as_generated()).facts()["score"]
    mean = float(rewards.mean())
    texts = machinery.texts(batch, rewards, prompts)
    return Evaluation(Measured(subject, step, mean), {subject.metric: mean, **values, **failed}, texts)


def evaluate_given(machinery: Machinery, step: int, subject: Subject) -> Evaluation:
    """How the policy ranks the held-out responses that the data have, where no engines run.

    Args:
        step: after which the policy is evaluated.
        subject: what is measured, and of what.
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
    return Evaluation(Measured(subject, step, accuracy), {subject.metric: accuracy} | figures)
