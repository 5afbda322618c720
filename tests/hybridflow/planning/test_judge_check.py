"""A recipe with a judge of its own: what it must have, what it must not, and what is foreseen of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.judge_identity import judge_identity
from hybridflow.config.recipe import load_recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.recipe_check import check_recipe
from tests.support.judge_model import ENGINE, make_judge

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "launch/recipes/demo.yaml"
ASKS: dict[str, Any] = {
    "name": "quality",
    "path": "judge",
    "arguments": {"rubric": "{{ response }}", "score_range": [0, 1]},
}


def asking(**changes: Any) -> str:
    return "reward.functions=" + json.dumps([ASKS | changes])


def judge(directory: Path, **engine: Any) -> list[str]:
    settings = json.dumps({"path": str(directory), "engine": ENGINE | engine})
    return [asking(), f"judge={settings}", "placement.judge=cpu:2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("judge"))


def lines_of(overrides: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        check_recipe(load_recipe(DEMO, overrides))
    return "\n".join(caught.value.lines)


def test_a_judge_is_there_where_it_is_asked_and_nowhere_else() -> None:
    url = {"arguments": {**ASKS["arguments"], "url": "http://judge/v1"}}
    for overrides, line in (
        ([asking()], "reward.functions.quality has path judge without arguments.url, expected one, or judge.path and"),
        (["judge.path=/models/judge"], "judge is set, and no function asks it; expected one with path: judge"),
        ([asking(), "judge.path=/models/judge"], "judge is set without placement.judge, expected devices of its own"),
        (["placement.judge=cpu:2"], "placement.judge is set, and there is no such role with judge=null"),
        ([asking(**url)], "url and model, expected both, or neither for the recipe's judge"),
        ([asking(arguments=ASKS["arguments"] | {"cached_as": "x"})], "arguments.cached_as without url"),
        (
            [asking(), "judge={path: /j, engine: {server_args: {port: 3}}}"],
            "server_args.port is not set here; set nothing: it takes a free one",
        ),
        ([asking(), "judge={path: /j, engine: {tp: 4, ep: 3}}"], "ep is 3 and must divide tp, which is 4"),
        (
            [asking(), "judge={path: /j, engine: {server_args: {quantisation: fp8}}}"],
            "server_args.quantisation is not an argument of SGLang's ServerArgs; did you mean quantization?",
        ),
    ):
        with pytest.raises(SettingsError) as caught:
            load_recipe(DEMO, overrides)
        assert line in str(caught.value)


def test_what_is_no_judge_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    assert "judge.path: /nowhere has no config.json" in lines_of(judge(Path("/nowhere")))
    assert "judge.path: context_length is 999; " in lines_of(judge(model, context_length=999))
    assert "judge.engine.tp=3 does not divide the model's 4 attention heads" in lines_of(judge(model, tp=3))
    shared = [*judge(model), "placement.judge=cpu:0"]
    assert "placement.judge and placement.actor are both on cpu:0 of node 0, expected devices of its own" in lines_of(
        shared
    )
    two = [*judge(model, tp=2), "placement.judge=cpu:2-4"]
    assert "placement.judge: 3 devices for engines of judge.engine.tp=2, expected a multiple" in lines_of(two)
    other = judge(model, server_args={"attention_backend": "triton"})
    assert "judge.engine.server_args.attention_backend=triton: on a CPU SGLang runs with torch_native" in lines_of(
        other
    )
    bare = make_judge(tmp_path / "bare")
    for template in bare.glob("chat_template*"):
        template.unlink()
    assert f"judge.path: {bare} has no chat template" in lines_of(judge(bare))
    (bare / "tokenizer.json").unlink()
    assert f"judge.path: {bare} holds no tokenizer" in lines_of(judge(bare))


def test_functions_wait_for_the_judge_and_know_it_from_others(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(DEMO, judge(model))
    assert recipe.asked_judge is recipe.judge is not None and recipe.device_maps["judge"] == "cpu:2"
    other = load_recipe(DEMO, judge(make_judge(tmp_path / "same"), context_length=128)).judge
    same = load_recipe(DEMO, judge(make_judge(tmp_path / "moved"))).judge
    assert other is not None and same is not None
    assert judge_identity(recipe.judge) == judge_identity(same) != judge_identity(other)


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.json", "tokenizer.model", "merges.txt"])
def test_verdicts_are_of_the_files_of_the_tokenizer_too(tmp_path: Path, name: str) -> None:
    made = make_judge(tmp_path)
    known = load_recipe(DEMO, judge(made)).judge
    assert known is not None
    before = judge_identity(known)
    (made / name).write_text("of another tokenizer")
    after = judge_identity(known)
    (made / name).write_text("of another Tokenizer")
    assert len({before, after, judge_identity(known)}) == 3


def test_verdicts_are_of_the_template_that_the_server_is_given(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    known = load_recipe(DEMO, judge(model, server_args={"chat_template": str(template)})).judge
    assert known is not None
    before = judge_identity(known)
    template.write_text("{{ messages[-1] }}")
    assert judge_identity(known) != before
