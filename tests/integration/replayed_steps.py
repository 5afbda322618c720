"""The steps of an algorithm once more from their stored samples, on the roles that have made them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hybridflow.config.replay_recipe import ReplayRecipe
from hybridflow.rundir.file_names import EVENTS, SAMPLE_STORE
from hybridflow.rundir.samples.files import sample_file
from hybridflow.trainer.replaying.comparison import TOLERANCES, compare_metrics
from hybridflow.trainer.replaying.replay import ReplayedRun
from hybridflow.trainer.replaying.stored_step import StepMetadata, StoredStep, all_learned
from hybridflow.trainer.trainer import Trainer
from tests.support.runs import records

REPLAYED = "replayed.json"
"""File in the directory of a case: differences of its replay."""
_NOT_MADE_AGAIN = {
    "dapo": {"rollout", "reward", "sampling"},
    "dapo-overlong": {"rollout", "reward", "sampling"},
    "rloo-dynamic": {"rollout", "reward", "sampling"},
    "pf_ppo": {"rollout", "reward", "sampling", "replay"},
    "dpo-group": {"rollout", "reward", "preference"},
}
"""Groups of metrics of samples that were drawn and not learned from, by case."""


def expect_replayed(case: Path) -> None:
    """Check that the replay of a case, by its directory, has differed in nothing.

    Raises:
        AssertionError: it has.
    """
    replay = json.loads((case / REPLAYED).read_text())
    assert replay["differing"] == []
    assert any(step["compared"] for step in replay["steps"])
    for step in replay["steps"]:
        assert step["weights"] and step["differing"] == []
        not_made = {metric for metric in step["not_made"] if not metric.endswith(("/failed", "/dropped"))}
        assert {metric.partition("/")[0] for metric in not_made} <= _NOT_MADE_AGAIN.get(case.name, set())


def initial_models(trainer: Trainer) -> None:
    """The initial weights in every model, and fresh optimizers."""
    roles, recipe = trainer.roles, trainer.recipe
    for role, group in {"actor": roles.actor, **roles.models}.items():
        if role != "teacher":
            group.load(trainer.setup.model_directory).result()
        if role in roles.trained:
            group.reset_optimizer(recipe.train_config(role).optimizer).result()


def replayed(trainer: Trainer, run: Path, steps: int) -> dict[str, Any]:
    """Make the steps again that a trainer has made, from its files; what is not as it was.

    Returns:
        For each step its figures that differ, the weights of the actor if theirs do, and which figures were not found
        again; and the roles whose last weights differ.
    """
    recipe, last = ReplayRecipe.of(trainer.recipe), _digests(trainer)
    models = {role: group for role, group in trainer.roles.scalar.items() if role in recipe.models}
    roles = dataclasses.replace(trainer.roles, rollout=None, functions={}, scalar=models)
    again = ReplayedRun(recipe, trainer.setup, roles, trainer.phases)
    weights = [event for event in _events(run) if event["event"] == "weights"]
    initial_models(trainer)
    replay: dict[str, Any] = {"steps": []}
    version, ran = weights[0]["version"], records(run, "train")
    for number in range(1, steps + 1):
        step = again.step(number, version + number)
        path = sample_file(run / SAMPLE_STORE, number)
        compared = None
        if path.exists():
            metadata = StepMetadata.read(path)
            assert (metadata.step, metadata.version) == (number, version + number)
            stored = StoredStep.read(path, keeps_samples=recipe.algorithm.kept_samples > 0)
            step.make_again(stored, all_learned=all_learned(recipe.algorithm, recipe.samples_per_step, metadata))
            compared = compare_metrics(ran[number - 1], step.values, TOLERANCES["float32"], same_layout=True)
        digests = roles.actor.weights_digest().result()
        replay["steps"].append(
            {
                "compared": compared is not None and compared.compared,
                "differing": [] if compared is None else [list(difference) for difference in compared.differing],
                "not_made": [] if compared is None else list(compared.not_made),
                "weights": digests == weights[number]["digests"],
            }
        )
    replay["differing"] = [role for role, digests in _digests(trainer).items() if digests != last[role]]
    return replay


def _digests(trainer: Trainer) -> dict[str, list[str]]:
    return {role: group.weights_digest().result() for role, group in trainer.roles.learning.items()}


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
