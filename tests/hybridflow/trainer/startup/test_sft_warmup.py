"""Calls of the warm-up to the actor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine3d.training.config import OptimizerConfig
from hybridflow.config.recipe import load_recipe
from hybridflow.trainer.startup.run_setup import prepare
from hybridflow.trainer.startup.sft_warmup import warm_up
from tests.support.resumable import DEMO


class BegunError(Exception):
    """Raised by an actor when it is to train."""


class TrainingActor:
    """Notes by which optimizer it is to learn, and ends."""

    def reset_optimizer(self, settings: OptimizerConfig) -> None:
        self.optimizer = settings
        raise BegunError


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["offload", "precision_aware"])
def test_the_optimizers_state_lies_where_training_has_it(tmp_path: Path, setting: str) -> None:
    recipe = load_recipe(DEMO, [f"run_dir={tmp_path}", "train.dtype=bfloat16", f"train.optimizer.{setting}=true"])
    assert recipe.warmup is not None and not getattr(recipe.warmup.optimizer, setting)
    actor, run = TrainingActor(), prepare(recipe)
    phases: Any = SimpleNamespace(enter=lambda phase: None)
    roles: Any = SimpleNamespace(actor=actor)
    sinks: Any = None
    with run.lock, pytest.raises(BegunError):
        warm_up(recipe, run, roles, phases, sinks)
    assert actor.optimizer == recipe.warmup.optimizer.model_copy(update={setting: True})
