"""Samples of a step as the store has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from hybridflow.batch.sample_table import ByName
from hybridflow.trainer.replaying.stored_step import StepMetadata, StoredStep
from hybridflow.trainer.samples.store import TrainedSamples
from tests.support.stored_samples import learned_from, samples_of, store

TEXTS = [("1+1=", "2"), ("1+1=", "3 abc"), ("2+1=", "3"), ("2+1=", "22")]


def test_all_that_an_update_needs_comes_back(tmp_path: Path) -> None:
    batch = samples_of(TEXTS, [0.1, 1.0, 0.5, 0.25], group=2, costs=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    by_name = {
        "reward/exact": ByName(batch.sample_ids[1:], torch.tensor([0.5, 0.25, 0.75])),
        "cost/model": ByName(batch.sample_ids, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    }
    learned = learned_from(3, batch, by_name, advantages=torch.tensor([1.0, -1.0, 0.1, -0.1]))
    path = store(tmp_path, TrainedSamples(3, 4, learned.batches, by_name, {0: 0.1, 1: -2.0}))
    assert StepMetadata.read(path).samples == 4
    stored = StoredStep.read(path, keeps_samples=False)
    for name, column in batch.columns().items():
        assert torch.equal(stored.batch.columns()[name], column), name
    assert stored.advantages is not None and stored.advantages.tolist() == torch.tensor([1.0, -1.0, 0.1, -0.1]).tolist()
    assert stored.baselines == {0: torch.tensor(0.1).item(), 1: -2.0}
    assert list(stored.by_name) == ["cost/model"] and not stored.recalled.any()


def test_what_an_algorithm_has_kept_has_no_rewards_by_name(tmp_path: Path) -> None:
    batch = samples_of(TEXTS, [0.1, 1.0, 0.5, 0.25])
    by_name = {"reward/exact": ByName(batch.sample_ids[1:], torch.tensor([0.5, 0.25, 0.75]))}
    path = store(tmp_path, learned_from(3, batch, by_name))
    assert StoredStep.read(path, keeps_samples=True).recalled.tolist() == [True, False, False, False]
    assert StoredStep.read(path, keeps_samples=False).advantages is None


def test_samples_of_several_updates_are_refused(tmp_path: Path) -> None:
    learned = learned_from(3, samples_of(TEXTS, [0.1, 1.0, 0.5, 0.25]))
    path = store(tmp_path, TrainedSamples(3, 4, learned.batches * 2))
    with pytest.raises(UserError, match="has trained on 2 batches, expected one"):
        StepMetadata.read(path)
