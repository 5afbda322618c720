"""Recipes of several actors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.actors import load_one_recipe, load_recipes
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from tests.support.runs import DEMO, ROOT

IPPO = ROOT / "launch/recipes/algorithms/ippo.yaml"


def refused(path: Path, *overrides: str, actor: str | None = None) -> list[str]:
    with pytest.raises(SettingsError) as error:
        load_recipes(path, overrides, actor)
    return [line.replace(str(path), "recipe") for line in error.value.lines]


def written(directory: Path, text: str) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(f"base: {DEMO}\nname: both\nalgorithm: {{name: ippo}}\nrollout: {{samples_per_prompt: 4}}\n{text}")
    return path


def test_each_actor_is_a_recipe_of_its_own(tmp_path: Path) -> None:
    recipes = load_recipes(IPPO, [f"run_dir={tmp_path}", "seed=5", "actors.adder.train.optimizer.lr=0.5"])
    assert list(recipes) == ["adder", "brief"]
    adder, brief = recipes.values()
    assert (adder.directory, brief.directory) == (tmp_path / "ippo/adder", tmp_path / "ippo/brief")
    assert (adder.seed, brief.seed) == (5, 2)
    assert (adder.train.optimizer.lr, brief.train.optimizer.lr) == (0.5, 3.0e-4)
    assert adder.train.layout != brief.train.layout
    assert adder.placement.actor != brief.placement.actor
    assert [function.name for function in brief.reward.functions] == ["arithmetic", "length"] if brief.reward else False
    assert load_recipes(IPPO, [f"run_dir={tmp_path}"], "brief") == {"brief": brief}
    assert load_one_recipe(IPPO, [f"run_dir={tmp_path}"], "brief") == brief


def test_a_recipe_without_actors_is_as_ever() -> None:
    assert load_recipes(DEMO) == {"": load_recipe(DEMO)}
    with pytest.raises(SettingsError, match="--actor brief, and the recipe has no actors"):
        load_recipes(DEMO, [], "brief")


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    one = "expected 2 to 64 names, each with its settings"
    assert refused(written(tmp_path, "actors: {}")) == [f"recipe:5: actors: found 0 of them, {one}"]
    assert refused(written(tmp_path, "actors: {a: {}}")) == [f"recipe:5: actors: found 1 of them, {one}"]
    assert refused(written(tmp_path, "actors: 3")) == [f"recipe:5: actors: found 3, {one}"]
    assert refused(written(tmp_path, "actors: {a/b: {}, c: 1, d: {name: x, run_dir: y}}")) == [
        "recipe:5: actors: 'a/b' is no name, expected letters, digits and ._-",
        "recipe:5: actors.c: found 1, expected settings of a recipe",
        "recipe:5: actors.d.name is set, which is of the whole run",
        "recipe:5: actors.d.run_dir is set, which is of the whole run",
    ]
    assert refused(written(tmp_path, "actors: {a: {seed: -1}, b: {sed: 1}}")) == [
        "actor a: recipe:5: seed = -1: expected at least 0",
        "actor b: recipe:5: unknown key sed: did you mean seed?",
    ]
    assert refused(written(tmp_path, "actors: {a: {}, b: {}}"), actor="c") == [
        "recipe: --actor c: expected one of a, b"
    ]
    assert refused(written(tmp_path, "")) == [
        "recipe: algorithm.name=ippo without actors; expected actors: {NAME: {settings}, ...}, or ppo for one actor"
    ]
    with pytest.raises(SettingsError, match="the recipe has the actors adder, brief, expected one of them alone"):
        load_one_recipe(IPPO)
