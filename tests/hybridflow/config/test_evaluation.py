"""Held-out sets of a recipe: what they take from other settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.evaluation import EvaluationSet
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.reading.yaml_loader import SettingsError, settings_yaml
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.trainer.startup.rollout_source import stream_plan
from tests.support.resumable import DEMO

SUMS = "evaluation.sums.data.path=sums.jsonl"
KEEP = "checkpoint.keep_best={metric: eval/sums/pass@1}"
WITHOUT_ENGINES = [
    "algorithm={name: dpo, pairs: file}", "data={source: arithmetic}", "rollout=null", "reward=null",
    "placement={actor: 'cpu:0-1'}", "evaluation.eval={samples: 1, temperature: 0.0}",
]  # fmt: skip


def recipe(*overrides: str) -> Recipe:
    return load_recipe(DEMO, [SUMS, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        recipe(*overrides)
    return str(caught.value)


def test_a_set_takes_its_rewards_and_its_limit_from_the_run() -> None:
    other_reward = (
        "evaluation.own={data: {path: o.jsonl}, samples: 8, temperature: 0.6, max_new_tokens: 9, interval: 3, "
        "before_train: false, sampling: {top_p: 0.95}, reward: {functions: [{name: exact, path: arithmetic}]}}"
    )
    sets = recipe("evaluation.eval.temperature=0.5", "evaluation.sums.interval=7", other_reward).sets
    assert list(sets) == ["eval", "sums", "own"]
    sums, other = sets["sums"], sets["own"]
    assert (sums.scorer, other.scorer) == ("reward", "evaluation.own")
    assert (sums.sampling.temperature, sums.sampling.max_new_tokens) == (0, 4)
    assert (other.sampling.temperature, other.sampling.max_new_tokens, other.sampling.top_p) == (0.6, 9, 0.95)
    assert other.metrics[:7] == [
        f"eval/own/{figure}"
        for figure in ("accuracy", "mean@8", "pass@1", "pass@2", "pass@4", "pass@8", "maj@8")
    ]  # fmt: skip
    assert [step for step in range(11) if other.due(step, 10)] == [3, 6, 9, 10]
    assert [step for step in range(11) if sums.due(step, 10)] == [0, 7, 10]
    functions = recipe(other_reward).all_functions
    assert list(functions) == ["reward", "evaluation.own"] and functions["evaluation.own"].functions[0].name == "exact"
    assert list(recipe(other_reward).functions) == ["reward"]  # what steps and streams score with


def test_the_set_eval_is_there_where_the_data_hold_out_prompts() -> None:
    given = load_recipe(DEMO.parent / "h200-1gpu.yaml").sets
    assert (list(given), given["eval"].settings) == (["eval"], EvaluationSet())
    assert load_recipe(DEMO, ["evaluation.eval=null"]).sets == {}
    files = ("data={source: files, files: {train: [{path: a.jsonl}]}}", "warmup=null", "evaluation.eval=null")
    assert load_recipe(DEMO, files).sets == {}
    held_out = recipe().sets["eval"]
    assert held_out.metrics[:3] == ["eval/accuracy", "eval/mean@4", "eval/pass@1"] and held_out.scorer == "reward"


@pytest.mark.parametrize(
    ("overrides", "measure"),
    [
        ((), "accuracy"),
        (("reward.functions=[{name: a, path: arithmetic, weight: 2.0}]",), "reward_mean"),
        (("reward.functions=[{name: length, path: length}]",), "reward_mean"),
        (("reward=null", "reward_model.path=/models/scorer"), "score_mean"),
        (tuple(WITHOUT_ENGINES), "preference_accuracy"),
    ],
)
def test_only_exact_matches_are_an_accuracy(overrides: tuple[str, ...], measure: str) -> None:
    planned = load_recipe(DEMO, overrides).sets["eval"]
    assert planned.measure == measure and planned.metrics[0] == f"eval/{measure}"


def test_a_recipe_with_sets_is_written_and_read_again(tmp_path: Path) -> None:
    given = recipe("evaluation.sums.samples=4", "evaluation.sums.temperature=1", "checkpoint.save_interval=10", KEEP)
    (tmp_path / "recipe.yaml").write_text(settings_yaml(given))
    assert load_recipe(tmp_path / "recipe.yaml") == given


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["evaluation.sums.samples=4", "evaluation.sums.temperature=0"],
            "evaluation.sums.samples=4 with temperature=0, which would draw the same text 4 times; expected a "
            "temperature above 0, or samples=1",
        ),
        (
            ["evaluation.sums.sampling.top_p=0.9", "evaluation.sums.temperature=0"],
            "evaluation.sums.sampling.top_p is set with temperature=0, which takes the most likely token",
        ),
        (
            ["evaluation.sums.sampling.min_p=0.1", "rollout.engine.deterministic=true"],
            "evaluation.sums.sampling.min_p is set with rollout.engine.deterministic=true",
        ),
        (["evaluation.sums.sampling.top_k=1", "evaluation.sums.temperature=0.5"], "evaluation.sums: top_k is 1"),
        (["evaluation.a b.data.path=x.jsonl"], "evaluation: 'a b' is no name of a set, expected letters, digits, _"),
        (["evaluation.sums.data.weight=2"], "evaluation.sums.data: weight is set, which is of training prompts"),
        (["evaluation.sums.data=null"], "evaluation.sums.data is missing, expected evaluation.sums.data.path"),
        (["evaluation.sums.k=4"], "unknown key evaluation.sums.k: evaluation.sums takes data, reward, prompts"),
        (
            [*WITHOUT_ENGINES, "trainer.async_evaluation=true"],
            "trainer.async_evaluation=true with algorithm.name=dpo and algorithm.pairs=file, which learns from",
        ),
        (
            ["trainer.async_evaluation=true", "rollout.stream={}", "placement.rollout=cpu:2"],
            "trainer.async_evaluation=true with rollout.stream, whose engines respond to prompts of further steps",
        ),
        (WITHOUT_ENGINES, "evaluation.sums is set with algorithm.name=dpo, which learns from responses that the data"),
        (
            [*WITHOUT_ENGINES, "evaluation.eval.max_new_tokens=4"],
            "evaluation.eval.max_new_tokens is set with algorithm.name=dpo, which learns from responses that the data",
        ),
        ([KEEP, "checkpoint.save_interval=null"], "checkpoint: keep_best of eval/sums/pass@1 in a run that saves"),
        (
            ["checkpoint.keep_best.metric=train/loss", "checkpoint.save_interval=5"],
            "'train/loss' is no figure of a set in evaluation, expected such as eval/NAME/pass@1",
        ),
        (
            ["checkpoint.keep_best.metric=eval/other/pass@1", "checkpoint.save_interval=5"],
            "checkpoint.keep_best.metric=eval/other/pass@1 is not measured in this run, expected one of eval/accuracy, "
            "eval/sums/accuracy",
        ),
        (
            ["checkpoint.keep_best.metric=eval/sums/pass@4", "checkpoint.save_interval=5"],
            "is not measured in this run, expected one of eval/sums/accuracy, eval/sums/mean@1, eval/sums/pass@1",
        ),
        (
            [KEEP, "checkpoint.save_interval=7", "evaluation.sums.interval=40", "warmup=null"],
            "checkpoint.keep_best.metric=eval/sums/pass@1 is measured every 40 steps and checkpoints are saved every "
            "7: of 120 steps only the last has both",
        ),
        (
            [KEEP, "checkpoint.save_interval=7", "warmup=null"],
            "is measured after the last step alone and checkpoints are saved every 7",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(overrides: list[str], line: str) -> None:
    assert line in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.save_interval=40", "evaluation.sums.interval=20", "warmup=null"],
        ["checkpoint.save_interval=7", "evaluation.sums.interval=40"],  # the model after the warm-up, and the last
        ["checkpoint.save_interval=40", "trainer.steps=null", "trainer.epochs_of_data=1", "warmup=null"],
    ],
)
def test_a_best_checkpoint_has_to_choose_from_something(overrides: list[str]) -> None:
    assert recipe(KEEP, *overrides).checkpoint.keep_best is not None


def test_a_model_alone_has_its_own_weights_and_devices_that_nothing_else_computes_on() -> None:
    engine = "rollout.engine.server_args={load_format: dummy, schedule_policy: fcfs}"
    scored = ("reward=null", "reward_model={path: /models/scorer, offload: true}")
    alone = EvaluationRecipe.of(recipe(engine, *scored), ["sums"])
    assert alone.rollout.engine.server_args == {"schedule_policy": "fcfs"} and alone.rollout.stream is None
    assert [(role, model.offload) for role, model in alone.models.items()] == [("reward_model", False)]


def test_episodes_of_an_evaluation_need_nothing_of_groups_and_of_engines_that_weights_are_sent_to() -> None:
    stream = "rollout.stream={dynamic_batching: true, engine_restarts: 2}"
    trained = load_recipe(DEMO.with_name("game.yaml"), ["trainer.max_staleness=1", stream])
    alone = EvaluationRecipe.of(trained, trained.sets)
    plan = stream_plan(alone, Prompts([], []), 1)  # of which no prompt trains
    assert plan.episodes is not None and plan.bounds is None and plan.restarts == 0


def test_a_set_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(f"base: {DEMO}\nevaluation:\n  a: {{data: {{path: a.jsonl}}}}\n  a: {{data: {{path: b.jsonl}}}}\n")
    with pytest.raises(SettingsError, match="twice"):
        load_recipe(path)
