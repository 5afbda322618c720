"""Advantages of an episode's turns, each from the return of its turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.group_relative import turn_baselines
from hybridflow.algorithms.base import Step
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import TURN_COUNT, TURN_RETURN_SQUARES, TURN_RETURN_SUM, Columns

if TYPE_CHECKING:
    from hybridflow.algorithms.settings import AlgorithmSettings


def has_turns(batch: RemoteBatch) -> bool:
    """True if the samples are episodes whose turns have returns (`environment.credit` is turn)."""
    return TURN_COUNT in batch.per_sample


def with_turn_advantages(step: Step[Any], batch: RemoteBatch, *, normalise_by_std: bool) -> RemoteBatch:
    """Add the advantages of turns, computed where the tokens are."""
    columns = batch.per_sample
    baselines = turn_baselines(
        columns[TURN_COUNT],
        columns[TURN_RETURN_SUM],
        columns[TURN_RETURN_SQUARES],
        columns["group_ids"],
        normalise_by_std=normalise_by_std,
    )
    return batch.with_columns(step.apply(batch, turn_advantages, baselines=baselines))


def turn_advantages(
    batch: SampleBatch, *, config: AlgorithmSettings, baselines: Mapping[int, tuple[float, float]]
) -> Columns:
    """Compute column `advantages`: the return of a token's turn less the mean of its group, divided by its scale.

    Args:
        batch: with `turns` and `turn_returns`.
        config: not used.
        baselines: `turn_baselines` of the groups.
    """
    assert batch.turns is not None and batch.turn_returns is not None
    of_samples = torch.tensor([baselines[group] for group in batch.group_ids.tolist()], dtype=torch.float64)
    mean, scale = of_samples.view(-1, 2).repeat_interleave(batch.response_lengths, dim=0).unbind(1)
    advantages = ((batch.turn_returns.double() - mean) / scale).float()
    return Columns({"advantages": advantages.where(batch.turns > 0, 0.0)})
