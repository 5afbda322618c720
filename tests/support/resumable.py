"""Recipes, and checkpoints as their runs make them but for the state of the roles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import Manifest, RoleFacts, file_entry, step_directory, write_manifest
from engine3d.errors import UserError
from hybridflow.checkpoint.compatibility import input_checksums
from hybridflow.checkpoint.driver_state import RandomState, RunState
from hybridflow.checkpoint.evaluation_result import Measured
from hybridflow.checkpoint.resume import find_resumption
from hybridflow.checkpoint.set_results import Best, MeasuredSet
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import Recipe, load_recipe

DEMO = Path(__file__).parents[2] / "launch/recipes/demo.yaml"
SMALL = ("data.arithmetic.train_size=64", "trainer.eval_prompts=16", "checkpoint.save_interval=1")


def a_recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(DEMO, [f"run_dir={directory}", "name=small", *SMALL, *overrides])


def make_checkpoint(
    recipe: Recipe,
    step: int,
    root: Path | None = None,
    run: str = "first",
    model: Path | None = None,
    roles: tuple[str, ...] = ("actor",),
    evaluations: tuple[Measured | None, Measured | None] = (None, None),
    last_of_sets: dict[str, MeasuredSet] | None = None,
    best: Best | None = None,
) -> Path:
    """A whole checkpoint as a run of the recipe makes it, but for the state of its roles."""
    directory = step_directory(root or recipe.checkpoint_directory, step)
    directory.mkdir(parents=True)
    copied = directory / "model"
    if model is None:
        create_model(recipe, copied, seed=recipe.seed)
    else:
        shutil.copytree(model, copied)
    (copied / "model.safetensors").unlink()
    state = RunState(
        step=step,
        policy_version=step + 1,
        samples_drawn=10,
        sampler={"count": 64, "seed": 1, "position": 8 * step},
        updates=step,
        steps_without_update=0,
        first_evaluation=evaluations[0],
        last_evaluation=evaluations[1],
        last_of_sets=last_of_sets or {},
        best=best,
        random=RandomState.capture(),
        run=run,
        inputs=input_checksums(recipe),
    )
    files = [*state.write(directory), *copied.iterdir()]
    manifest = Manifest(
        step=step,
        created="2026-01-01T00:00:00+00:00",
        roles={role: RoleFacts("dp=2 ep=2", 2, "float32", role != "actor", 1000, step) for role in roles},
        recipe=recipe.model_dump(mode="json"),
        software={},
        files=tuple(file_entry(directory, path) for path in files),
    )
    write_manifest(directory, manifest)
    return directory


def refusal(recipe: Recipe) -> list[str]:
    with pytest.raises(UserError) as caught:
        find_resumption(recipe)
    return str(caught.value).splitlines()
