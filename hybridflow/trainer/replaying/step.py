"""A step whose samples and rewards are stored ones; all that models say of them is found again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine3d.errors import UserError
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.rollout.rollouts import Rollout
from hybridflow.trainer.replaying.stored_step import StoredStep
from hybridflow.trainer.step import TrainerStep
from hybridflow.trainer.step_record import Scores, rollout_metrics


@dataclass
class ReplayedStep(TrainerStep):
    """One step of a run, once more."""

    def make_again(self, stored: StoredStep, *, all_learned: bool) -> None:
        """Make all of its updates.

        Args:
            stored: samples that it has trained on.
            all_learned: true if these are all samples that were drawn for it: then metrics of samples are computed
                again too.
        """
        algorithm = load(self.config.name)
        algorithm.learn(self, self.experience(stored, all_learned=all_learned))

    def experience(self, stored: StoredStep, *, all_learned: bool) -> Experience:
        """Build the experience: the samples with the columns that models compute, and advantages."""
        serving, batch = self.version - 1, RemoteBatch.of(stored.batch)
        algorithm = load(self.config.name)
        if self.config.needs_engines:
            versions = stored.batch.policy_versions
            self.record.stale = self.contract.allows_older or bool((versions < serving).any())
        self.record.recalled.update(stored.batch.sample_ids[stored.recalled].tolist())
        self.record.tokens = int(batch.lengths.sum())
        if all_learned:
            self.values |= rollout_metrics([Rollout(batch, None)], serving) | _score_metrics(stored)
        batch = algorithm.read(self, batch)
        experience = Experience(batch, baselines=stored.baselines)
        if self.config.compares_with_left_out:
            if stored.advantages is None:
                raise UserError(f"replay: step {self.number}: the samples have no advantages, expected one of each")
            return Experience(batch.with_per_sample(advantages=stored.advantages))
        return algorithm.with_advantages(self, experience)


def _score_metrics(stored: StoredStep) -> dict[str, float]:
    """Metrics of rewards and costs, as a step logs them of all its samples."""
    values: dict[str, float] = {}
    batch = stored.batch
    sums: dict[str, Any] = {"reward": batch.rewards, "cost": batch.costs}
    for what, total in sums.items():
        if total is not None:
            kept = torch.ones(len(batch), dtype=torch.bool)
            scores = Scores(batch.sample_ids, total, kept, None, stored.by_name.get(f"{what}/model"))
            values |= scores.metrics(what)
    for name, column in stored.by_name.items():
        if name.rpartition("/")[0] in stored.by_name:  # a metric of a function, or a count
            continue
        values[f"{name}/mean"] = float(column[~column.isnan()].mean())
    return values
