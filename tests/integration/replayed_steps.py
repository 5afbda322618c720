"""The steps of an algorithm once more from their stored samples, on the roles that have made them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hybridflow.config.replay_recipe import ReplayRecipe
from hybridflow.rundir.file_names import EVENTS, SAMPLE_STORE
from hybridflow.rundir.sample_files import sample_file
from hybridflow.trainer.replaying.comparison import TOLERANCES, compare_figures
from hybridflow.trainer.replaying.replay import ReplayedRun
from hybridflow.trainer.replaying.stored_step import StepFacts, StoredStep, all_learned
from hybridflow.trainer.trainer import Trainer
from tests.support.runs import records

REPLAYED = "replayed.json"
"""In the directory of a case: what differs in its replay."""


def initial_models(trainer: Trainer) -> None:
    """The initial weights in every model, and fresh optimizers."""
    roles, recipe = trainer.roles, trainer.recipe
    for role, group in {"actor": roles.actor, **roles.models}.items():
        if role != "teacher":
            group.load(trainer.facts.model_directory).result()
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
    again = ReplayedRun(recipe, trainer.facts, roles, trainer.phases)
    weights = [event for event in _events(run) if event["event"] == "weights"]
    initial_models(trainer)
    found: dict[str, Any] = {"steps": []}
    version, ran = weights[0]["version"], records(run, "train")
    for number in range(1, steps + 1):
        step = again.step(number, version + number)
        path = sample_file(run / SAMPLE_STORE, number)
        compared = None
        if path.exists():
            facts = StepFacts.read(path)
            assert (facts.step, facts.version) == (number, version + number)
            stored = StoredStep.read(path, keeps_samples=recipe.algorithm.kept_samples > 0)
            step.make_again(stored, all_learned=all_learned(recipe, facts))
            compared = compare_figures(ran[number - 1], step.values, TOLERANCES["float32"], same_layout=True)
        digests = roles.actor.weights_digest().result()
        found["steps"].append(
            {
                "compared": compared is not None and compared.compared,
                "differing": [] if compared is None else [list(each) for each in compared.differing],
                "not_made": [] if compared is None else list(compared.not_made),
                "weights": digests == weights[number]["digests"],
            }
        )
    found["differing"] = [role for role, digests in _digests(trainer).items() if digests != last[role]]
    return found


def _digests(trainer: Trainer) -> dict[str, list[str]]:
    return {role: group.weights_digest().result() for role, group in trainer.roles.learning.items()}


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
