"""Mean difference of log-probs of engine and trainer, in verl's metrics of rollout correction.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper

_NAME = "logprob_abs_diff"
_verls_metrics = rollout_corr_helper.compute_offpolicy_metrics
_verls_loss = core_algos.get_policy_loss_fn("vanilla")


def _difference(one: Tensor, other: Tensor, response_mask: Tensor) -> float:
    mask = response_mask.bool()
    return float(((one - other).abs().where(mask, 0.0).sum() / mask.sum()).item())


def _metrics_with_difference(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    metrics: dict[str, Any] = _verls_metrics(old_log_prob, rollout_log_prob, response_mask)
    if rollout_log_prob is not None:
        metrics[_NAME] = _difference(old_log_prob, rollout_log_prob, response_mask)
    return metrics


def _loss_with_difference(**arguments: Any) -> tuple[Tensor, dict[str, Any]]:
    # With bypass_mode verl makes no metrics of rollout correction: the log-probs of the old policy are the engine's.
    loss, metrics = _verls_loss(**arguments)
    log_probs = (arguments["log_prob"].detach(), arguments["old_log_prob"])
    return loss, metrics | {f"rollout_corr/{_NAME}": _difference(*log_probs, arguments["response_mask"])}


rollout_corr_helper.compute_offpolicy_metrics = _metrics_with_difference
core_algos.POLICY_LOSS_REGISTRY["vanilla"] = _loss_with_difference
