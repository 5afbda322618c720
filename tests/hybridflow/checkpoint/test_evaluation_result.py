"""What evaluations measured, of which prompts and when: nothing that was not measured, nothing by a wrong name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hybridflow.checkpoint.evaluation_result import Measured, Subject, summary
from hybridflow.checkpoint.resume import RUN_IDENTITY
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.trainer.run_setup import prepare
from hybridflow.trainer.trainer import train
from tests.support.judge_model import judge_and_another
from tests.support.resumable import a_recipe, make_checkpoint

DEMO = "launch/recipes/demo.yaml"
LENGTH = "reward.functions=[{name: length, path: length}]"


def prepared(directory: Path, *overrides: str) -> tuple[Recipe, Prompts, tuple[Prompts, Prompts]]:
    recipe = load_recipe(DEMO, [f"run_dir={directory}", "overwrite=true", *overrides])
    run = prepare(recipe)
    run.lock.close()
    return recipe, run.evaluation, (run.train, run.sft)


def lines(path: Path, *operands: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in operands))
    return path


def from_files(directory: Path, train: Path, evaluation: Path, *others: str) -> Subject:
    data = f"data={{source: jsonl, jsonl: {{train_path: {train}, eval_path: {evaluation}}}}}"
    return Subject.of(*prepared(directory, "warmup=null", data, *others))


def test_the_demo_measures_its_accuracy_on_prompts_that_neither_phase_saw(tmp_path: Path) -> None:
    subject = Subject.of(*prepared(tmp_path))
    assert (subject.measure, subject.prompts, subject.learned_from) == ("accuracy", 256, 0)
    assert (str(subject), subject.metric) == ("held-out accuracy", "eval/accuracy")


@pytest.mark.parametrize(
    ("overrides", "text", "metric"),
    [
        ((LENGTH,), "mean reward of 256 held-out prompts", "eval/reward_mean"),
        (
            ("reward.functions=[{name: a, path: arithmetic, weight: 2.0}]",),
            "mean reward of 256 held-out prompts",
            "eval/reward_mean",
        ),
        (
            ("reward=null", "reward_model.path=/models/scorer"),
            "mean reward model score of 256 held-out prompts",
            "eval/score_mean",
        ),
    ],
)
def test_only_exact_matches_are_an_accuracy(tmp_path: Path, overrides: tuple[str, ...], text: str, metric: str) -> None:
    subject = Subject.of(*prepared(tmp_path, *overrides))
    assert (str(subject), subject.metric) == (text, metric)


def test_prompts_that_are_learned_from_are_not_held_out(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.jsonl", 1, 2, 3, 4)
    same = from_files(tmp_path, train, train)
    assert (same.learned_from, same.metric) == (4, "eval/training_accuracy")
    assert str(same) == "accuracy of 4 training prompts"
    some = from_files(tmp_path, train, lines(tmp_path / "some.jsonl", 4, 5, 6), LENGTH)
    assert (some.learned_from, some.metric) == (1, "eval/training_reward_mean")
    assert str(some) == "mean reward of 3 prompts (1 of them training prompts)"
    others = lines(tmp_path / "others.jsonl", 5, 6)
    assert from_files(tmp_path, train, others).learned_from == 0
    learned = (f"data.jsonl.sft_path={others}", "warmup={steps: 1, batch_size: 1}")
    assert from_files(tmp_path, train, others, *learned).learned_from == 2  # by the warm-up


def test_figures_compare_only_where_the_same_was_measured(tmp_path: Path) -> None:
    subject = Subject.of(*prepared(tmp_path))
    assert Subject.of(*prepared(tmp_path, "trainer.steps=3", "trainer.eval_interval=2")) == subject
    for other in ("trainer.eval_temperature=0", "trainer.eval_samples=1", "trainer.eval_prompts=16", LENGTH):
        assert Subject.of(*prepared(tmp_path, other)) != subject, other
    function = "{name: short, path: length_limit, arguments: {soft: 3, hard: %d}}"
    one, two = (Subject.of(*prepared(tmp_path, f"reward.functions=[{function % hard}]")) for hard in (4, 5))
    assert one != two  # by what the function is given


def test_verdicts_of_another_judge_do_not_compare(tmp_path: Path) -> None:
    asked = judge_and_another(tmp_path, "reward.functions")
    one, other, again = (Subject.of(*prepared(tmp_path, *overrides)) for overrides in asked)
    assert one == again != other
    sums = lines(tmp_path / "sums.jsonl", 1, 2)
    functions, *others = asked[0]
    of_a_set = functions.replace("reward", "evaluation.sums.reward")
    unasked = Subject.of(*prepared(tmp_path, f"evaluation.sums.data.path={sums}", of_a_set, *others))
    assert unasked == Subject.of(*prepared(tmp_path))  # where a set's functions ask it alone


HELD_OUT = Subject("accuracy", 256, 0, "1")
REWARD = Subject("reward_mean", 64, 0, "2")


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (None, None, []),
        (
            Measured(HELD_OUT, 0, 0.419),
            Measured(HELD_OUT, 120, 0.723),
            ["held-out accuracy: 0.419 -> 0.723 (+30.4 points), 256 prompts, step 0 -> step 120"],
        ),
        (
            Measured(REWARD, 0, -0.5),
            Measured(REWARD, 7, 1.25),
            ["mean reward of 64 held-out prompts: -0.500 -> 1.250, step 0 -> step 7"],
        ),
        (Measured(HELD_OUT, 0, 0.419), Measured(HELD_OUT, 0, 0.419), ["held-out accuracy: 0.419, 256 prompts, step 0"]),
        (
            Measured(REWARD, 0, 0.5),
            Measured(dataclasses.replace(REWARD, identity="3"), 9, 0.75),
            [
                "mean reward of 64 held-out prompts: 0.500, step 0",
                "mean reward of 64 held-out prompts: 0.750, step 9; not compared, because it was measured otherwise",
            ],
        ),
    ],
)
def test_a_run_says_what_it_measured_and_nothing_else(
    first: Measured | None, last: Measured | None, said: list[str]
) -> None:
    assert summary(first, last) == said


def test_a_run_that_is_resumed_with_fewer_steps_says_what_was_measured_and_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Measured(HELD_OUT, 0, 0.419)
    make_checkpoint(a_recipe(tmp_path), 5, evaluations=(before, before))
    (tmp_path / "small" / RUN_IDENTITY).write_text("first\n")
    outcome = train(a_recipe(tmp_path, "resume=auto", "trainer.steps=3", "trainer.export=false"))
    said = capsys.readouterr().out.splitlines()
    assert "resume: all 3 steps are done; the checkpoint is after step 5; a larger trainer.steps trains on" in said
    assert [line for line in said if "accuracy" in line] == ["held-out accuracy: 0.419, 256 prompts, step 0"]
    assert (outcome.first, outcome.last) == (before, before)
