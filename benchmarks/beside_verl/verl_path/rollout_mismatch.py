"""Mean difference of log-probs of engine and trainer, in verl's metrics of rollout correction.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper

_verls = rollout_corr_helper.compute_offpolicy_metrics


def _with_difference(old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor) -> dict[str, Any]:
    metrics: dict[str, Any] = _verls(old_log_prob, rollout_log_prob, response_mask)
    if rollout_log_prob is not None:
        mask = response_mask.bool()
        difference = (old_log_prob - rollout_log_prob).abs().where(mask, 0.0)
        metrics["logprob_abs_diff"] = (difference.sum() / mask.sum()).item()
    return metrics


rollout_corr_helper.compute_offpolicy_metrics = _with_difference
