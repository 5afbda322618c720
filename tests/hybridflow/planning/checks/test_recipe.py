"""All checks of a recipe together, and those of several actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine3d.checkpoint.reading.verify import damaged_shard
from hybridflow.config.actors import load_recipes
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_actors, check_recipe
from tests.support.resumable import a_recipe, make_checkpoint
from tests.support.runs import ROOT


@pytest.mark.slow
def test_a_dry_run_returns_the_resumption_and_reads_shards_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    read: list[Path] = []

    def reads(directory: Path, *, most_bytes: int) -> str | None:
        read.append(directory)
        return damaged_shard(directory, most_bytes=most_bytes)

    monkeypatch.setattr("hybridflow.checkpoint.resume.damaged_shard", reads)
    recipe = a_recipe(tmp_path, "resume=auto")
    assert check_recipe(recipe, dry_run=True) == [f"resume: after step 2, from {checkpoint}"]
    assert read == [checkpoint]
    assert check_recipe(recipe) == []  # the run itself logs it


@pytest.mark.slow
def test_a_role_of_observations_that_the_template_escapes_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text(
        "{%- for message in messages -%}<|{{ message.role }}|>"
        "{{ message.content | tojson if message.role == 'tool' else message.content }}<|end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    )
    changed = ["environment.role=tool", f"data.files.chat.template={template}", f"run_dir={tmp_path}/run"]
    recipe = load_recipe(ROOT / "launch/recipes/game.yaml", changed)
    with pytest.raises(SettingsError, match=r"environment\.role=tool: the chat template escapes quotes"):
        check_recipe(recipe)


IPPO = ROOT / "launch/recipes/algorithms/ippo.yaml"


def refused(directory: Path, *overrides: str, **options: Any) -> list[str]:
    recipes = load_recipes(IPPO, [f"run_dir={directory}", *overrides])
    with pytest.raises(SettingsError) as error:
        check_actors(recipes, **options)
    return [line.replace(str(directory), "DIR") for line in error.value.lines]


@pytest.mark.slow
def test_the_recipe_is_right(tmp_path: Path) -> None:
    assert check_actors(load_recipes(IPPO, [f"run_dir={tmp_path}"])) == []


@pytest.mark.slow
def test_actors_that_share_what_each_needs_alone_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "actors.brief.placement.rollout=cpu:0") == [
        "actor brief: placement.rollout has cpu:0 of node 0, as placement.actor of actor adder; actors learn at the "
        "same time, expected devices of its own"
    ]
    assert refused(tmp_path, f"checkpoint.dir={tmp_path}/kept") == [
        "actor brief: checkpoint.dir=DIR/kept is that of actor adder, expected another"
    ]


@pytest.mark.slow
def test_what_is_wrong_with_one_names_it(tmp_path: Path) -> None:
    [line] = refused(tmp_path, "actors.brief.train.layout.tp=3")
    assert line.startswith("actor brief: train.layout on placement.actor: ")


@pytest.mark.slow
def test_actors_that_fit_alone_and_not_together_are_refused(tmp_path: Path) -> None:
    [line] = refused(tmp_path, host_bytes=8_000_000_000)
    assert line.startswith("node 0: the actors take ") and "(adder " in line and line.endswith("on a node of 8.0 GB")
