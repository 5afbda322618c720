"""Figures of a step's samples, which may have come in several rollouts: of all that were drawn, as of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.sample_table import ByName
from hybridflow.batch.worker_output import joined_facts
from hybridflow.metrics import names as metrics
from hybridflow.rewards.result import RewardResult, join_results, reward_metrics
from hybridflow.rollout.source import Rollout


def rollout_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Lengths, times and staleness of responses, by metric name.

    Args:
        rollouts: of the step.
        version: of the weights before the step's.
    """
    facts = joined_facts([each.batch.facts for each in rollouts])
    lengths, values = facts["response_lengths"], {}
    seconds = [each.seconds for each in rollouts if each.seconds is not None]
    if len(seconds) == len(rollouts):
        values[metrics.ROLLOUT_TIME] = 1000 * sum(seconds)
        values[metrics.ROLLOUT_THROUGHPUT] = int(lengths.sum()) / sum(seconds)
    if (newest := facts.get("newest_versions")) is not None:
        values[metrics.STREAM_STALENESS_MAX] = int((version - facts["policy_versions"]).max())
        values[metrics.STREAM_MIXED_SHARE] = float((newest > facts["policy_versions"]).double().mean())
    values[metrics.ROLLOUT_STALENESS] = float((version - facts["policy_versions"]).double().mean())
    values[metrics.ROLLOUT_RESPONSE_LENGTH] = float(lengths.double().mean())
    values[metrics.ROLLOUT_TRUNCATED] = float((facts["finish_reasons"] == FinishReason.LENGTH).double().mean())
    return values


@dataclass(frozen=True, eq=False)
class Scores:
    """The rewards, or costs, of B samples.

    Args:
        sample_ids: (B,) int64.
        total: (B,) float32: of functions and model.
        kept: (B,) bool: not dropped.
        result: of the functions; None where there are none.
        model: (B,) float32: of the scoring model, without its weight; None where there is none.
    """

    sample_ids: Tensor
    total: Tensor
    kept: Tensor
    result: RewardResult | None
    model: Tensor | None

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        """Those of all parts, in order; all have the same functions and models."""
        results = [each.result for each in parts if each.result is not None]
        models = [each.model for each in parts if each.model is not None]
        return Scores(
            torch.cat([each.sample_ids for each in parts]),
            torch.cat([each.total for each in parts]),
            torch.cat([each.kept for each in parts]),
            join_results(results) if results else None,
            torch.cat(models) if models else None,
        )

    def by_name(self, what: str) -> dict[str, ByName]:
        """What each function has given, without its weight, and the model. `what`: "reward" or "cost"."""
        found = {} if self.result is None else dict(self.result.by_name)
        found |= {} if self.model is None else {"model": self.model}
        return {f"{what}/{name}": ByName(self.sample_ids, values) for name, values in found.items()}

    def metrics(self, what: str) -> dict[str, float]:
        """Figures by metric name. `what`: "reward" or "cost"."""
        values = reward_metrics(self.result, group=what) if self.result is not None else {}
        if self.model is not None:
            values[f"{what}/model/mean"] = float(self.model.mean())
        kept = self.total[self.kept]
        return values | {f"{what}/mean": float(kept.mean()), f"{what}/std": float(kept.std(correction=0))}
