"""Defaults of a recipe without a placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config import recipe as recipe_module
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe

MODEL = {"create": {"config": {"architectures": ["Qwen3ForCausalLM"]}}}


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, **settings: Any) -> Recipe:
    monkeypatch.setattr(recipe_module, "_gpus", lambda: gpus)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"name": "mine", "model": MODEL, **settings}))
    return load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("gpus", "devices", "dtype", "memory"), [(0, "cpu:0", "float32", 0.7), (4, "cuda:0-3", "bfloat16", 0.3)]
)
@pytest.mark.parametrize("given", [{}, {"placement": None}, {"placement": {"shared_gpus": True}}])
def test_without_a_placement_all_of_the_machine_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    gpus: int,
    devices: str,
    dtype: str,
    memory: float,
) -> None:
    recipe = loaded(tmp_path, monkeypatch, gpus, **given)
    assert (recipe.placement.actor, recipe.placement.rollout) == (devices, devices)
    assert (recipe.train.dtype, recipe.rollout.engine.dtype) == (dtype, dtype)
    assert recipe.rollout.engine.mem_fraction_static == memory
    assert recipe.placement.shared_gpus == bool((given.get("placement") or {}).get("shared_gpus"))


def test_what_the_recipe_says_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"mem_fraction_static": 0.5}
    recipe = loaded(tmp_path, monkeypatch, 2, train={"dtype": "float32"}, rollout={"engine": engine})
    assert (recipe.train.dtype, recipe.rollout.engine.dtype) == ("float32", "float32")
    assert recipe.rollout.engine.mem_fraction_static == 0.5
    placed = loaded(tmp_path, monkeypatch, 2, placement={"actor": "cpu:0", "rollout": "cpu:1"})
    assert placed.train.dtype == "bfloat16"


def test_without_engines_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = loaded(tmp_path, monkeypatch, 0, algorithm={"name": "kto"}, reward=None)
    assert (recipe.placement.actor, recipe.placement.rollout) == ("cpu:0", None)


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        ({"rollout": "cpu:0", "cluster": "auto"}, "placement.actor is missing"),
        ({"actor": "cpu:0"}, "placement.rollout is missing"),
        ("cuda:0", "placement"),
    ],
)
def test_a_placement_that_is_begun_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any, line: str
) -> None:
    with pytest.raises(SettingsError, match=line):
        loaded(tmp_path, monkeypatch, 4, placement=placement)
