"""The best checkpoint by a figure of a set, what makes two measurements comparable, and what is said of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import find_checkpoints, prune, step_directory
from hybridflow.checkpoint.resume import RUN_IDENTITY
from hybridflow.checkpoint.set_results import (
    Best,
    MeasuredSet,
    best_of,
    compared_with_run,
    learned_from,
    set_identity,
    summary_of_best,
    summary_of_sets,
)
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.initial_model import initial_tokenizer
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.config.run import BestConfig
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.metrics.evaluation_statistics import Measure
from hybridflow.planning.data.evaluation_sets import encode_sets
from hybridflow.roles.config import JudgeModel
from hybridflow.trainer.run import train
from tests.support.judge_model import judge_and_another, make_judge
from tests.support.resumable import DEMO, a_recipe, make_checkpoint

HIGHEST = BestConfig(metric="eval/aime/pass@1")
LOWEST = BestConfig(metric="eval/aime/pass@1", mode="min")


def measured(step: int, value: float, identity: str = "a") -> dict[str, MeasuredSet]:
    return {"aime": MeasuredSet(identity, "reward_mean", step, 30, 4, {"pass@1": value, "reward_mean": value})}


def course(settings: BestConfig | None, *values: float) -> list[int | None]:
    """The step of the best checkpoint after each of them, from 1."""
    best, bests = None, []
    for step, value in enumerate(values, start=1):
        best = best_of(settings, best, measured(step, value), step)
        bests.append(best.step if best is not None else None)
    return bests


def test_the_best_checkpoint_is_the_first_with_the_best_value() -> None:
    assert course(HIGHEST, 0.2, 0.5, 0.5, 0.4, 0.6) == [1, 2, 2, 2, 5]
    assert course(LOWEST, 0.2, 0.5, 0.1, 0.1) == [1, 1, 3, 3]
    assert course(None, 0.2, 0.5) == [None, None]
    assert course(HIGHEST, math.nan, 0.1, math.nan) == [None, 2, 2]


def test_a_checkpoint_of_a_step_that_was_not_measured_is_never_the_best() -> None:
    best = best_of(HIGHEST, None, measured(4, 0.5), 4)
    assert best == Best("eval/aime/pass@1", 4, 0.5, "a")
    assert best_of(HIGHEST, best, measured(4, 0.9), 5) == best
    assert best_of(HIGHEST, None, {}, 5) is None


def test_values_of_other_prompts_or_another_metric_are_not_compared() -> None:
    before = Best("eval/aime/pass@1", 4, 0.9, "a")
    now = best_of(HIGHEST, before, measured(8, 0.1, identity="b"), 8)
    assert now is not None and (now.step, now.value) == (8, 0.1)
    other = best_of(BestConfig(metric="eval/aime/reward_mean"), before, measured(8, 0.1), 8)
    assert other is not None and (other.step, other.metric) == (8, "eval/aime/reward_mean")
    assert best_of(BestConfig(metric="eval/aime/reward_mean"), before, measured(4, 0.1), 8) is None


def test_the_best_checkpoint_stays_when_older_ones_go(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for step in (1, 2, 3, 4):
        make_checkpoint(recipe, step)
    root = recipe.checkpoint_directory
    assert prune(root, 1, (2,)) == [step_directory(root, step) for step in (1, 3)]
    assert find_checkpoints(root)[0] == [step_directory(root, step) for step in (4, 2)]
    assert prune(root, 1, (4,)) == [step_directory(root, 2)]


def a_set(directory: Path, *overrides: str, answer: int = 3) -> tuple[Recipe, Prompts]:
    directory.mkdir(exist_ok=True)
    path = directory / "sums.jsonl"
    path.write_text(json.dumps({"prompt": "1+2=", "answer": answer}) + "\n" + '{"prompt": "2+2=", "answer": 4}\n')
    recipe = load_recipe(DEMO, [f"evaluation.sums.data.path={path}", *overrides])
    tokenizer, _ = initial_tokenizer(recipe.model, directory)
    return recipe, encode_sets(recipe, tokenizer)["sums"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "answer", "same"),
    [
        ((), 3, True),
        (("evaluation.sums.interval=7", "evaluation.sums.texts=1", "evaluation.sums.before_train=false"), 3, True),
        (("evaluation.sums.samples=2", "evaluation.sums.temperature=1"), 3, False),
        (("evaluation.sums.temperature=0.5",), 3, False),
        (("evaluation.sums.passing=0.5",), 3, False),
        (("evaluation.sums.prompts=1",), 3, False),
        (("evaluation.sums.reward.functions=[{name: length, path: length}]",), 3, False),
        ((), 5, False),
    ],
)
def test_what_makes_two_measurements_the_same(
    tmp_path: Path, overrides: tuple[str, ...], answer: int, same: bool
) -> None:
    recipe, prompts = a_set(tmp_path / "one")
    other, others = a_set(tmp_path / "other", *overrides, answer=answer)
    equal = identity(recipe, prompts) == identity(other, others)
    assert equal == same


def identity(recipe: Recipe, prompts: Prompts) -> str:
    return set_identity(
        recipe.sets["sums"],
        prompts,
        algorithm=recipe.algorithm.name,
        judge=recipe.judge,
        reward_model=recipe.reward_model,
    )


def test_scores_of_another_reward_model_are_other_measurements(tmp_path: Path) -> None:
    scored = [a_set(tmp_path, "reward=null", f"reward_model.path=/models/{name}") for name in ("a", "b", "a")]
    first, other, again = (identity(*pair) for pair in scored)
    assert first == again != other
    recipe, prompts = scored[0]
    alone = EvaluationRecipe.of(recipe, ["sums"])
    assert alone.reward_model is not None
    assert identity(alone, prompts) == first


def test_verdicts_of_another_judge_are_other_measurements(tmp_path: Path) -> None:
    judges = judge_and_another(tmp_path, "evaluation.sums.reward.functions")
    sets = (a_set(tmp_path, *overrides) for overrides in judges)
    one, other, again = (identity(recipe, prompts) for recipe, prompts in sets)
    assert one == again != other


def test_a_set_that_asks_no_judge_is_measured_as_ever(tmp_path: Path) -> None:
    recipe, prompts = a_set(tmp_path)
    known = recipe.model_copy(update={"judge": JudgeModel(path=make_judge(tmp_path / "judge"))})
    assert identity(known, prompts) == identity(recipe, prompts)


def test_prompts_that_are_learned_from_are_counted(tmp_path: Path) -> None:
    _, prompts = a_set(tmp_path)
    training = Prompts([Example("2+2=", "4"), Example("7+7=", "14")], [[1], [2]])
    assert learned_from(prompts, [training, Prompts([], [])]) == 1
    assert learned_from(prompts, [Prompts([], [])]) == 0


def test_a_run_says_what_became_of_each_set() -> None:
    begin, end = measured(0, 0.1)["aime"], measured(8, 0.4)["aime"]
    end = replace(end, statistics=end.statistics | {"reward_mean_low": 0.3, "reward_mean_high": 0.52})
    words = "aime, mean reward of 30 held-out prompts"
    assert summary_of_sets({"aime": begin}, {"aime": end}) == [
        f"{words}: 0.100 -> 0.400 [0.300, 0.520], step 0 -> step 8"
    ]
    assert summary_of_sets({"aime": end}, {"aime": end}) == [f"{words}: 0.400 [0.300, 0.520], step 8"]
    assert summary_of_sets({"aime": replace(begin, identity="b")}, {"aime": end}) == [
        f"{words}: 0.400 [0.300, 0.520], step 8; not compared with the first, which was measured otherwise"
    ]
    assert summary_of_best(Best("eval/aime/pass@1", 4, 0.9, "a")) == ["best checkpoint: step 4, eval/aime/pass@1 0.9"]
    assert summary_of_best(None) == []


@pytest.mark.parametrize(
    ("value", "interval", "identity", "temperature", "said"),
    [
        (0.02, (0.01, 0.04), "a", 1.0, ": the same"),
        (0.005, (0.001, 0.02), "a", 1.0, ", from other random numbers at temperature 1; the intervals overlap"),
        (0.9, (0.8, 0.95), "a", 0.7, ", from other random numbers at temperature 0.7; the intervals do not overlap"),
        (0.005, None, "a", 0.7, ", from other random numbers at temperature 0.7"),
        (
            *(0.021, (0.01, 0.04), "a", 0.0),
            ", with the same most likely tokens but for rounding, which depends on how requests are batched; the "
            "intervals overlap",
        ),
        (0.005, (0.001, 0.02), "b", 1.0, " with other prompts, answers, rewards or sampling: not comparable"),
    ],
)
def test_a_measurement_is_compared_with_the_one_of_the_run(
    value: float, interval: tuple[float, float] | None, identity: str, temperature: float, said: str
) -> None:
    run = MeasuredSet(
        "a", "accuracy", 4, 200, 1, {"mean@1": 0.02, "mean@1_low": 0.01, "mean@1_high": 0.04, "training_prompts": 0}
    )
    ends = {} if interval is None else {"mean@1_low": interval[0], "mean@1_high": interval[1]}
    here = MeasuredSet(identity, "accuracy", 4, 200, 1, {"mean@1": value} | ends)
    line = compared_with_run("sums", here, run, temperature)
    assert line == f"sums: the run measured mean@1 0.020 [0.010, 0.040] of this checkpoint{said}"


def of_eval(
    measure: Measure, step: int, value: float, *, prompts: int = 64, learned: int = 0
) -> dict[str, MeasuredSet]:
    values: dict[str, float] = {measure: value, "training_prompts": learned}
    return {"eval": MeasuredSet("a", measure, step, prompts, 4, values)}


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ({}, {}, []),
        (
            of_eval("accuracy", 0, 0.419, prompts=256),
            of_eval("accuracy", 120, 0.723, prompts=256),
            ["held-out accuracy: 0.419 -> 0.723 (+30.4 points), 256 prompts, step 0 -> step 120"],
        ),
        (
            of_eval("accuracy", 0, 0.419, prompts=256),
            of_eval("accuracy", 0, 0.419, prompts=256),
            ["held-out accuracy: 0.419, 256 prompts, step 0"],
        ),
        (
            of_eval("reward_mean", 0, -0.5),
            of_eval("reward_mean", 7, 1.25),
            ["mean reward of 64 held-out prompts: -0.500 -> 1.250, step 0 -> step 7"],
        ),
        ({}, of_eval("accuracy", 4, 0.5, learned=64), ["accuracy of 64 training prompts: 0.500, step 4"]),
        (
            {},
            of_eval("score_mean", 4, 0.5, learned=1),
            ["mean reward model score of 64 prompts (1 of them training prompts): 0.500, step 4"],
        ),
        (
            of_eval("preference_accuracy", 0, 0.5),
            of_eval("preference_accuracy", 2, 0.434),
            ["preference accuracy of 64 held-out examples: 0.500 -> 0.434 (-6.6 points), step 0 -> step 2"],
        ),
    ],
)
def test_a_run_says_what_became_of_the_held_out_prompts(
    first: dict[str, MeasuredSet], last: dict[str, MeasuredSet], said: list[str]
) -> None:
    assert summary_of_sets(first, last) == said


@pytest.mark.slow
def test_a_run_that_is_resumed_with_fewer_steps_says_what_was_measured_and_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = of_eval("accuracy", 0, 0.419, prompts=256)
    make_checkpoint(a_recipe(tmp_path), 5, first_measured=before, last_measured=before)
    (tmp_path / "small" / RUN_IDENTITY).write_text("first\n")
    outcome = train(a_recipe(tmp_path, "resume=auto", "trainer.steps=3", "trainer.export=false"))
    said = capsys.readouterr().out.splitlines()
    assert "resume: all 3 steps are done; the checkpoint is after step 5; a larger trainer.steps trains on" in said
    assert [line for line in said if "accuracy" in line] == ["held-out accuracy: 0.419, 256 prompts, step 0"]
    assert (outcome.first, outcome.last) == (before, before)
