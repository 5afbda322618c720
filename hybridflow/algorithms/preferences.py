"""Shared parts of algorithms that train on preferences: two responses to each prompt, and no advantages.

An update is made in two passes, exact on every layout and however a mini-batch is cut. `prepare` has the policy of just
before the update say the log-prob of each response; the loss of whole responses, and its derivative by each log-prob,
are found in the driver; the update's loss is the sum of the log-probs by these coefficients: see
`losses/preference.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.base import Experience, Step
from hybridflow.algorithms.checks import check_finite, check_rows
from hybridflow.algorithms.losses.preference import PreferenceLoss, ResponsePairs, coefficients
from hybridflow.algorithms.segments import segment_reduce
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS, Columns
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor

PAIR = 2
"""Samples of a prompt, which are adjacent and stay in one mini-batch."""

_OF_NO_MEANING = (metrics.TRAIN_RATIO, metrics.TRAIN_KL_K1, metrics.TRAIN_KL_K3, metrics.TRAIN_REFERENCE_KL)
"""Figures that every policy loss has, and that say nothing of responses that the data gave or that were chosen."""


class PreferenceSettings(AlgorithmSettings):
    """Settings of an algorithm that trains on preferences."""

    not_used: ClassVar[tuple[str, ...]] = (
        *("loss_aggregation", "loss_normalising_length", "entropy_coef", "entropy_controller", "entropy_target"),
        *("entropy_coef_step", "entropy_coef_max", "kl_coef", "kl_in", "kl_estimator", "kl_controller", "kl_target"),
        *("kl_horizon", "kl_guard", "correction"),
    )
    unscheduled: ClassVar[frozenset[str]] = AlgorithmSettings.unscheduled | frozenset(not_used)

    beta: float = Field(default=0.1, gt=0)
    """Strength that keeps the policy near the reference: a response's implicit reward is beta times its log-ratio."""


def sequence_logprobs(batch: SampleBatch, *, config: Any) -> Columns:
    """Compute per-sample column `policy`, (b,) float64: sums of `current_logprobs` over the loss tokens."""
    assert batch.current_logprobs is not None
    return Columns(per_sample={"policy": _sums(batch, batch.current_logprobs)})


def reference_sums(batch: SampleBatch, *, config: Any) -> Columns:
    """Compute per-sample column `reference`, (b,) float64: sums of `ref_logprobs` over the loss tokens."""
    assert batch.ref_logprobs is not None
    return Columns(per_sample={"reference": _sums(batch, batch.ref_logprobs)})


def _sums(batch: SampleBatch, column: Tensor) -> Tensor:
    """Sum (R,) values over each sample's loss tokens, independently of the other samples of the batch."""
    masked = column.where(batch.response_mask, 0.0).to(torch.float64)
    return segment_reduce(masked, batch.response_lengths)


def best_and_worst(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, int]:
    """Return the best and the worst sample of each group, by their rewards; of equal ones the first.

    A group in which all rewards are equal, and so every group of one, makes no pair.

    Args:
        rewards: (B,) float32.
        group_ids: (B,) int64.

    Returns:
        (2n,) int64: rows of the best and the worst sample of each group, side by side, in the order in which the groups
        first appear; and the number of groups that make no pair.

    Raises:
        ValueError: a reward that is not finite, naming its row, or columns of other shapes.
    """
    check_rows("best_and_worst", rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("best_and_worst", "reward", rewards)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        members.setdefault(group, []).append(row)
    values, pairs, without = rewards.tolist(), [], 0
    for rows in members.values():
        best, worst = max(rows, key=values.__getitem__), min(rows, key=values.__getitem__)
        if values[best] == values[worst]:
            without += 1
        else:
            pairs += [best, worst]
    return torch.tensor(pairs, dtype=torch.int64), without


def pairs_of_groups(step: Step[Any], batch: RemoteBatch) -> RemoteBatch:
    """Select the best and worst response of each group, and add the reference's log-probs."""
    rows, without = best_and_worst(batch.per_sample["rewards"], batch.per_sample["group_ids"])
    step.values[metrics.PREFERENCE_WITHOUT_DIFFERENCE] = without
    batch = batch.select(rows)
    if len(batch) < PAIR * step.least_samples:
        return batch  # there will be no update
    return with_reference(step, batch)


def with_reference(step: Step[Any], batch: RemoteBatch) -> RemoteBatch:
    """Add the reference's log-probs to pairs. Pairs of the data have them."""
    if not step.config.needs_reference:
        return batch
    batch = step.logprobs(batch)
    return batch.with_per_sample(reference_logprobs=step.apply(batch, reference_sums).per_sample()["reference"])


def with_advantages[C: PreferenceSettings](_: Step[C], experience: Experience) -> Experience:
    """Return the experience unchanged: `prepare` computes a response's weight before each update, from its policy."""
    return experience


def prepare(step: Step[Any], mini_batch: RemoteBatch, *, loss: PreferenceLoss, trained_on: int = PAIR) -> RemoteBatch:
    """Add the coefficient of each response as its advantage.

    Args:
        step: of the update.
        mini_batch: two samples a prompt, side by side.
        loss: of the two.
        trained_on: how many of the two, the first ones.
    """
    per_sample = mini_batch.per_sample
    policy = step.apply(step.current_logprobs(mini_batch), sequence_logprobs).per_sample()["policy"]
    responses = ResponsePairs.of_samples(
        policy, per_sample["reference_logprobs"], per_sample[LOSS_TOKENS], per_sample["rewards"]
    )
    gradient, result = coefficients(responses, loss, step.config)
    step.log(result.values)
    step.values[metrics.PREFERENCE_EXAMPLES] = step.values.get(metrics.PREFERENCE_EXAMPLES, 0) + len(gradient)
    # The coefficients hold all weight there is; those of tokens only say which ones count.
    batch = mini_batch.with_per_sample(advantages=-gradient.flatten().float(), weights=torch.ones(len(mini_batch)))
    return batch if trained_on == PAIR else batch.select(torch.arange(0, len(batch), PAIR))


def learn[C: PreferenceSettings](step: Step[C], experience: Experience) -> None:
    """Update the actor, unless too few groups made a pair. The logged loss is that of the responses."""
    if (there := len(experience.batch)) < (least := PAIR * step.least_samples):
        log.warning(f"step {step.number}: {there // PAIR} pairs, and an update needs {least // PAIR}: none is made")
        return
    step.update(replace(experience, whiten=None))
    for name in (metrics.TRAIN_LOSS, metrics.TRAIN_POLICY_LOSS):
        step.values[name] = step.values[metrics.PREFERENCE_LOSS]
    for name in _OF_NO_MEANING:
        step.values.pop(name, None)
