"""Recipes of algorithms that learn from preferences: with engines, without, and what means nothing in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.actors import load_recipes
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import DEMO, ROOT

RECIPES = ROOT / "launch/recipes/algorithms"
FILE = "algorithm.name=dpo and algorithm.pairs=file, which learns from responses that the data have, without engines"
KTO = "algorithm.name=kto, which learns from responses that the data have, without engines"
GOOD = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n'


def a_recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


@pytest.mark.parametrize(
    ("name", "override", "line"),
    [
        ("dpo", "placement.rollout=cpu:2", f"placement.rollout is set with {FILE}; expected null, or none of it"),
        ("kto", "placement.rollout=cpu:2", f"placement.rollout is set with {KTO}; expected null, or none of it"),
        (
            "dpo",
            "rollout={sampling: {temperature: 0.7}}",
            f"rollout.sampling.temperature is set with {FILE}; expected rollout=null, or none of it",
        ),
        ("dpo", "rollout={samples_per_prompt: 4}", f"rollout.samples_per_prompt is set with {FILE}; expected rollout="),
        ("dpo", "reward.functions=[{name: length, path: length}]", f"reward is set with {FILE}; expected null"),
        ("kto", "reward_model={path: a, train: {}}", f"reward_model is set with {KTO}; expected null, or none of it"),
        (
            "dpo",
            "trainer.profile={steps: [1], rollout_steps: 4}",
            f"trainer.profile.rollout_steps=4 is set with {FILE}; expected 0",
        ),
        ("dpo", "evaluation.eval.samples=2", "evaluation.eval.samples is set with algorithm.name=dpo, which learns"),
        ("dpo", "trainer.max_staleness=1", "trainer.max_staleness=1 with algorithm.name=dpo, which was not"),
        ("dpo_online", "trainer.max_staleness=1", "trainer.max_staleness=1 with algorithm.name=dpo, which was not"),
        (
            "dpo",
            "data={source: jsonl, jsonl: {train_path: a, eval_path: a, sft_path: a}}",
            f"data.source=jsonl with {FILE}; expected data.source=pairs, or arithmetic",
        ),
        (
            "dpo_online",
            "data={source: pairs, pairs: {train_path: a, eval_path: a, sft_path: a}}",
            "data.source=pairs with algorithm.name=dpo, whose responses engines generate; expected data.source=jsonl",
        ),
        ("dpo_online", "placement.rollout=null", "placement.rollout is missing: the devices of the engines"),
        ("dpo_online", "rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1 with algorithm.name=dpo, where a"),
        ("dpo", "placement.reference=cpu:0", "placement.reference is set, and there is no such role with"),
        ("dpo", "data={source: pairs}", "pairs is missing with source 'pairs', expected it with source 'pairs'"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_in_one_line(name: str, override: str, line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        a_recipe(name, override)
    [message] = caught.value.lines
    assert line in message


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto"])
def test_without_engines_only_the_actor_runs(name: str) -> None:
    recipe = a_recipe(name)
    assert not recipe.algorithm.needs_engines and not recipe.algorithm.needs_reference
    assert recipe.device_maps == {"actor": "cpu:0-1"}
    assert recipe.samples_per_step == 2 * recipe.trainer.prompts_per_step
    assert recipe.functions == {}


def test_from_groups_engines_rewards_and_a_reference_run() -> None:
    recipe = a_recipe("dpo_online")
    assert recipe.device_maps == {"actor": "cpu:0-1", "rollout": "cpu:0", "reference": "cpu:0-1"}
    assert list(recipe.functions) == ["reward"]


def test_a_base_s_rollout_is_taken_away_with_null() -> None:
    assert a_recipe("dpo").rollout == Recipe.model_fields["rollout"].get_default(call_default_factory=True)
    assert load_recipe(DEMO, ["rollout.samples_per_prompt=2"]).rollout.samples_per_prompt == 2


def with_pairs(directory: Path, lines: str, *overrides: str, name: str = "dpo") -> Recipe:
    path, good = directory / "p.jsonl", directory / "good.jsonl"
    path.write_text(lines)
    good.write_text(GOOD * 256)
    files = json.dumps({"train_path": str(path), "eval_path": str(good), "sft_path": str(good)})
    return a_recipe(name, f"run_dir={directory}", "data.source=pairs", f"data.pairs={files}", *overrides)


def test_check_looks_at_the_pairs(tmp_path: Path) -> None:
    check_recipe(with_pairs(tmp_path, GOOD * 64))
    same = '{"prompt": "1+2=", "chosen": "3", "rejected": "3"}\n'
    with pytest.raises(SettingsError) as caught:
        check_recipe(with_pairs(tmp_path, GOOD * 64 + same))
    [line] = caught.value.lines
    assert line.startswith(f"{tmp_path}/p.jsonl:65: the better and the worse response are the same; expected two that")
    notes = check_recipe(with_pairs(tmp_path, GOOD * 64 + same, "data.pairs.same_responses=drop"))
    assert notes == [
        "data: 1 of 65 training pairs have the same response twice and are left out; the first is "
        f"{tmp_path}/p.jsonl:65",
        "evaluation.eval: the model learns from 256 of its 256 prompts too",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+1=", "chosen": "2"}', "p.jsonl:65: no field 'rejected', only 'prompt', 'chosen'"),
        ('{"prompt": "1+1=", "chosen": [99], "rejected": "3"}', "99"),
        ('{"prompt": "1+1=", "chosen": "two", "rejected": "3"}', "p.jsonl:65: the response"),
        (
            json.dumps({"prompt": "1" * 63, "chosen": "2", "rejected": "3"}),
            "p.jsonl:65: the prompt has 63 tokens and its",
        ),
    ],
)
def test_check_names_the_line_of_a_pair_that_cannot_serve(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_recipe(with_pairs(tmp_path, GOOD * 64 + line))
    [refused] = caught.value.lines
    assert message in refused


@pytest.mark.slow
def test_check_refuses_fewer_pairs_than_ranks_share(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        check_recipe(a_recipe("dpo", f"run_dir={tmp_path}", "trainer.prompts_per_step=3", "trainer.mini_batches=2"))
    assert list(caught.value.lines) == [
        "trainer.prompts_per_step = 3, expected at least 4: a prompt for each data-parallel rank of each of "
        "trainer.mini_batches"
    ]


def test_one_actor_learns_from_pairs_beside_one_with_engines(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    of_one_actor: dict[str, Any] = {"algorithm": {"name": "dpo"}, "rollout": None}
    of_one_actor |= {"placement": {"actor": "cpu:2", "rollout": None}}
    of_one_actor |= {"evaluation": {"eval": {"samples": 1, "temperature": 0.0}}, "train": {"layout": {"ep": 1}}}
    actors = {"paired": of_one_actor, "rewarded": {"placement": {"actor": "cpu:0-1", "rollout": "cpu:0"}}}
    path.write_text(f"base: {DEMO}\nrun_dir: {tmp_path}\nactors: {json.dumps(actors)}\n")
    recipes = load_recipes(path)
    assert [recipe.algorithm.needs_engines for recipe in recipes.values()] == [False, True]
