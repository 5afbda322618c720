"""The prompts of held-out sets: read, limited, and in the size of the KV cache; and refusals of `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.cli.main import main
from hybridflow.config.initial_model import initial_tokenizer
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import arithmetic_held_out
from hybridflow.planning.data.evaluation_sets import check_sets, encode_sets
from hybridflow.planning.memory.samples import Lengths, cache_tokens
from tests.support.resumable import DEMO


def rows(path: Path, *given: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return f"evaluation.sums.data.path={path}"


def sums(path: Path, count: int = 6) -> str:
    return rows(path, *({"prompt": f"{number}+1=", "answer": number + 1} for number in range(count)))


def encoded(tmp_path: Path, *overrides: str) -> tuple[Recipe, dict[str, Prompts]]:
    recipe = load_recipe(DEMO, overrides)
    (tmp_path / "tokenizer").mkdir()
    tokenizer, _ = initial_tokenizer(recipe.model, tmp_path / "tokenizer")
    return recipe, encode_sets(recipe, tokenizer)


def test_the_prompts_of_a_set_are_the_first_of_its_files(tmp_path: Path) -> None:
    recipe, sets = encoded(tmp_path, sums(tmp_path / "sums.jsonl"), "evaluation.sums.prompts=4")
    assert [example.prompt for example in sets["sums"].examples] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert [example.answer for example in sets["sums"].examples] == ["1", "2", "3", "4"]
    assert len(sets["sums"].tokens) == 4 and recipe.sets["sums"].settings.prompts == 4


def test_the_cache_has_room_for_the_responses_of_a_set(tmp_path: Path) -> None:
    settings = [f"evaluation.sums.{setting}" for setting in ("samples=200", "temperature=1", "max_new_tokens=50")]
    recipe, sets = encoded(tmp_path, sums(tmp_path / "sums.jsonl"), *settings, "rollout.engine.max_total_tokens=null")
    rollout, groups = recipe.rollout, recipe.groups_in_flight
    without = cache_tokens(
        rollout, groups, Lengths.of(rollout, recipe.sets, [[1] * 6], {"eval": sets["eval"]}), 1, "cpu"
    )
    lengths = Lengths.of(recipe.rollout, recipe.sets, [[1] * 6], {"sums": sets["sums"]})
    assert [(of_set.prompts, of_set.samples, of_set.sequence) for of_set in lengths.sets] == [(6, 200, 54)]
    assert lengths.longest_sequence == 54
    requests = recipe.rollout.engine.max_running_requests
    assert cache_tokens(rollout, groups, lengths, 1, "cpu") >= requests * 54 > without


def test_a_set_of_no_prompts_that_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"evaluation\.sums: .*sums.jsonl:1: the prompt has 4 tokens, expected at most 3"
    ):
        encoded(tmp_path, sums(tmp_path / "sums.jsonl"), "evaluation.sums.max_new_tokens=61")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["evaluation.sums.max_new_tokens=64"], "evaluation.sums: max_new_tokens=64 leaves no room for a prompt"),
        (
            ["evaluation.sums.reward.functions=[{name: mine, path: 'nowhere:score'}]"],
            "evaluation.sums: reward 'mine' (nowhere:score) cannot be imported",
        ),
        (["evaluation.other.data.path=/nowhere.jsonl"], "evaluation.other: cannot read rows from /nowhere.jsonl"),
    ],
)
def test_check_names_the_set(
    tmp_path: Path, overrides: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(DEMO), sums(tmp_path / "sums.jsonl"), *overrides]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1


def test_an_answer_that_no_text_equals_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = rows(tmp_path / "sums.jsonl", {"prompt": "1+1=", "answer": [2]}, {"prompt": "1+2=", "answer": 3})
    assert main(["check", str(DEMO), given]) == 2
    assert "evaluation.sums: reward arithmetic: an answer is '[2]' (list)" in capsys.readouterr().err


def test_more_engines_than_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = sums(tmp_path / "sums.jsonl", count=1)
    assert main(["check", str(DEMO), given, "placement.rollout=cpu:2-3"]) == 2
    assert (
        "evaluation.sums: 1 prompts, expected at least 2: a prompt for each rollout engine" in capsys.readouterr().err
    )


def test_limits_of_training_prompts_are_not_those_of_a_set(tmp_path: Path) -> None:
    training = tmp_path / "training.jsonl"
    training.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    files = f"{{train: [{{path: {training}}}], max_prompt_tokens: 4, cache: {tmp_path}/cache}}"
    given = rows(tmp_path / "sums.jsonl", {"prompt": "10+10=", "answer": 20}, {"prompt": "1+2=", "answer": 3})
    data = f"data={{source: files, files: {files}}}"
    recipe, sets = encoded(tmp_path, data, given, "warmup=null", "evaluation.eval=null")
    assert [example.prompt for example in sets["sums"].examples] == ["10+10=", "1+2="]
    assert list(sets) == list(recipe.sets) == ["sums"]


def test_the_set_eval_is_of_the_prompts_that_the_data_hold_out(tmp_path: Path) -> None:
    recipe, sets = encoded(tmp_path, "evaluation.eval.prompts=3", sums(tmp_path / "sums.jsonl"))
    assert list(sets) == ["eval", "sums"]
    assert list(sets["eval"].examples) == arithmetic_held_out(recipe.data.arithmetic)[:3]
    (tmp_path / "tokenizer").rename(tmp_path / "before")
    assert list(encoded(tmp_path, "evaluation.eval=null")[1]) == []


def test_every_reader_of_a_set_has_a_prompt(tmp_path: Path) -> None:
    scored = (
        "reward=null",
        "reward_model.path=/models/scorer",
        "evaluation.eval={prompts: 4, samples: 2, temperature: 1}",
    )
    recipe, sets = encoded(tmp_path, *scored)
    layouts = {"rollout": Layout(dp=3), "reward_model": Layout(dp=8)}
    check_sets(recipe.sets, sets, layouts)
    few = {"eval": Prompts(sets["eval"].examples[:3], sets["eval"].tokens[:3])}
    with pytest.raises(UserError, match=r"evaluation\.eval: 3 prompts with samples=2, expected at least 8 responses"):
        check_sets(recipe.sets, few, layouts)
    pairs = load_recipe(DEMO.parent / "algorithms/dpo.yaml")
    with pytest.raises(
        UserError, match=r"evaluation\.eval: 3 prompts, expected at least 4: one for each data-parallel"
    ):
        check_sets(pairs.sets, few, {"actor": Layout(dp=4)})
