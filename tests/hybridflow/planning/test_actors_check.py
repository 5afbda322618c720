"""What is found of several actors before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.actors import load_recipes
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.actors_check import check_actors
from tests.support.runs import ROOT

IPPO = ROOT / "launch/recipes/algorithms/ippo.yaml"


def refused(directory: Path, *overrides: str, **options: int) -> list[str]:
    recipes = load_recipes(IPPO, [f"run_dir={directory}", *overrides])
    with pytest.raises(SettingsError) as error:
        check_actors(recipes, **options)
    return [line.replace(str(directory), "DIR") for line in error.value.lines]


def test_the_recipe_is_right(tmp_path: Path) -> None:
    assert check_actors(load_recipes(IPPO, [f"run_dir={tmp_path}"])) == []


def test_actors_that_share_what_each_needs_alone_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "actors.brief.placement.rollout=cpu:0") == [
        "actor brief: placement.rollout has cpu:0 of node 0, as placement.actor of actor adder; actors learn at the "
        "same time, expected devices of its own"
    ]
    assert refused(tmp_path, f"checkpoint.dir={tmp_path}/kept") == [
        "actor brief: checkpoint.dir=DIR/kept is that of actor adder, expected another"
    ]


def test_what_is_wrong_with_one_names_it(tmp_path: Path) -> None:
    [line] = refused(tmp_path, "actors.brief.train.layout.tp=3")
    assert line.startswith("actor brief: train.layout on placement.actor: ")


def test_actors_that_fit_alone_and_not_together_are_refused(tmp_path: Path) -> None:
    [line] = refused(tmp_path, host_bytes=8_000_000_000)
    assert line.startswith("node 0: the actors take ") and "(adder " in line and line.endswith("on a node of 8.0 GB")
