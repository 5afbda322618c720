"""Pairs that no test has run are refused by name."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path

import pytest

from engine3d import models
from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Node
from hybridflow.config.actors import load_recipes
from hybridflow.config.initial_model import initial_spec
from hybridflow.planning.checks import feature_matrix
from hybridflow.planning.checks.feature_matrix import (
    FAMILIES,
    FEATURES,
    ITEMS,
    LAYOUT,
    RunFeatures,
    check_pairs,
    check_tested,
    is_refused,
    proven_runs,
)
from hybridflow.planning.checks.model import LANGUAGE_MODELS
from hybridflow.planning.checks.placement import planned_devices

ROOT = Path(__file__).parents[4]
RECIPES = sorted(
    path
    for path in [*(ROOT / "launch/recipes").rglob("*.yaml"), *(ROOT / "examples").glob("*.yaml")]
    if ("create:" in path.read_text() or "base:" in path.read_text()) and "create: null" not in path.read_text()
)


def test_every_run_names_one_family() -> None:
    for run in proven_runs():
        assert run <= set(ITEMS) and len(run.intersection(FAMILIES)) == 1


def test_a_pair_that_was_not_tested_is_refused_with_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [frozenset({"llama", "tp", "packing"}), frozenset({"llama", "tp", "critic"}), frozenset({"qwen3", "tp"})]
    pairs = frozenset(frozenset(pair) for run in runs for pair in combinations(run, 2))
    monkeypatch.setattr(feature_matrix, "proven_pairs", lambda: pairs)
    check_pairs("actor", {"llama": "llama models", "tp": "train.layout.tp=2", "packing": "train.packing=true"})
    with pytest.raises(UserError) as error:
        check_pairs("critic", {"tp": "tp=2", "packing": "train.packing=true", "critic": "a scalar head"})
    assert str(error.value) == (
        "critic: train.packing=true with a scalar head was not tested; critic was tested with llama, tp "
        "(docs/models.md)"
    )
    with pytest.raises(UserError, match=r"was not tested \(the first of 2 such pairs\); cp was tested with nothing"):
        check_pairs("actor", {"llama": "llama models", "tp": "tp=2", "cp": "train.layout.cp=2"})


def test_episodes_are_refused_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_matrix, "proven_pairs", lambda: frozenset())
    assert not is_refused("episodes", "tp")
    assert is_refused("streams", "tp") and is_refused("recomputation", "resharding") and is_refused("critic", "cp")


def test_the_families_are_those_that_there_are() -> None:
    assert {family.name for family in models.FAMILIES} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_proven_pairs_alone(path: Path) -> None:
    roles = ("train", "rollout") if path.stem == "several-hosts" else (None,)
    cluster = [Node(f"node {number}", 8, 0, role) for number in range(8) for role in roles]
    for recipe in load_recipes(path).values():
        spec = initial_spec(recipe.model)
        if spec is None:
            continue
        specs = {"actor": spec} | {
            role: dataclasses.replace(spec, value_head=role not in LANGUAGE_MODELS) for role in recipe.models
        }
        devices = planned_devices(recipe.device_maps, recipe.placement, cluster)
        assert devices is not None
        models = recipe.megatron_roles.items()
        layouts = {role: model.train.layout.layout(len(devices[role])) for role, model in models}
        check_tested(
            recipe.megatron_roles,
            specs,
            layouts,
            RunFeatures(
                recipe.rollout if recipe.starts_engines else None,
                recipe.checkpoint.save_interval,
                recipe.environment is not None,
            ),
        )


def test_items_are_distinct() -> None:
    assert len(set(ITEMS)) == len(FAMILIES) + len(LAYOUT) + len(FEATURES)
