"""Results that are kept of a run, and the learning curve that is drawn of them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.learning import RESULTS, Learned, curve, draw_curves, evaluation_values, learned, learners, read, table
from hybridflow.config.actors import load_recipes

ROOT = Path(__file__).parents[2]


def _learned(seed: int, *evaluations: tuple[int, float], recipe: str = "demo") -> Learned:
    return Learned(recipe, seed, list(evaluations), "eval/accuracy", [], 1.0, "", "", {})


def test_what_is_kept_is_what_the_metrics_say(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"phase": "sft", "step": 1, "sft/loss": 1.0},
        {"phase": "eval", "step": 0, "eval/reward_mean": 0.9, "eval/accuracy": 0.25},
        {"phase": "train", "step": 1, "reward/mean": 0.5},
        {"phase": "train", "step": 2, "reward/mean": 0.75},
        {"phase": "eval", "step": 2, "eval/reward_mean": 0.9, "eval/accuracy": 0.5},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert evaluation_values(path, "demo") == {"demo": "eval/accuracy"}
    run = learned(path, "demo", 3, 60.0, "hybridflow train", "eval/accuracy")
    assert (run.evaluations, run.figure, run.rewards) == ([(0, 0.25), (2, 0.5)], "eval/accuracy", [0.5, 0.75])
    path.write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(ValueError, match="no evaluation"):
        evaluation_values(path, "demo")


def test_a_run_of_episodes_is_measured_by_their_rewards(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"phase": "sft", "step": 1, "sft/loss": 1.0},
        {"phase": "train", "step": 1, "reward/environment/mean": 0.5, "reward/mean": 0.5},
        {"phase": "train", "step": 2, "reward/environment/mean": 0.75, "reward/mean": 0.75},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ((name, figure),) = evaluation_values(path, "game").items()
    assert learned(path, name, 1, 1.0, "", figure).evaluations == [(1, 0.5), (2, 0.75)]


def test_each_actor_of_a_run_is_a_learner(tmp_path: Path) -> None:
    for name in ("alone", "several/adder", "several/brief"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "several/logs").mkdir()
    assert learners(tmp_path / "alone", "demo") == {"demo": tmp_path / "alone/metrics.jsonl"}
    assert list(learners(tmp_path / "several", "ippo")) == ["ippo.adder", "ippo.brief"]


def test_a_run_without_engines_is_measured_by_its_preferences(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {
            "phase": "eval",
            "step": step,
            "eval/prompts": 8,
            "eval/preference_loss": 0.6,
            "eval/preference_accuracy": accuracy,
        }
        for step, accuracy in ((0, 0.5), (2, 0.75))
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = learned(path, "dpo", 1, 60.0, "hybridflow train", evaluation_values(path, "dpo")["dpo"])
    assert (run.evaluations, run.figure, run.rewards) == ([(0, 0.5), (2, 0.75)], "eval/preference_accuracy", [])
    (tmp_path / "kept/dpo").mkdir(parents=True)
    (tmp_path / "kept/demo").mkdir()
    (tmp_path / "kept/dpo/seed-1.json").write_text(json.dumps(run.__dict__))
    (tmp_path / "kept/demo/seed-1.json").write_text(json.dumps(_learned(1, (0, 0.25), (2, 0.5)).__dict__))
    _, dpo = draw_curves(tmp_path / "kept", tmp_path / "curves")
    text = "".join(ElementTree.parse(dpo).getroot().itertext())
    assert "share of held-out preferences that became likelier" in text
    assert "grpo" not in text  # whose accuracy is another figure
    path.write_text(json.dumps({"phase": "eval", "step": 0, "eval/prompts": 8}) + "\n")
    with pytest.raises(ValueError, match="expected one of eval/accuracy, "):
        evaluation_values(path, "dpo")


def test_each_held_out_set_is_kept_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    evaluations = [
        {"phase": "eval", "step": 0, "eval/plain/mean@4": 0.25, "eval/plain/pass@4": 0.5, "eval/carry/mean@8": 0.5},
        {"phase": "eval", "step": 2, "eval/plain/mean@4": 0.5},
        {"phase": "eval", "step": 4, "eval/plain/mean@4": 0.75, "eval/carry/mean@8": 1.0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in evaluations))
    by_learner = evaluation_values(path, "chat")
    assert by_learner == {"chat.plain": "eval/plain/mean@4", "chat.carry": "eval/carry/mean@8"}
    plain, carry = (learned(path, name, 1, 60.0, "hybridflow train", figure) for name, figure in by_learner.items())
    assert plain.evaluations == [(0, 0.25), (2, 0.5), (4, 0.75)]
    assert carry.evaluations == [(0, 0.5), (4, 1.0)] and carry.recipe == "chat.carry"


def test_a_curve_is_over_the_evaluations_that_all_seeds_have() -> None:
    band = curve([_learned(1, (0, 0.25), (20, 0.5), (40, 1.0)), _learned(2, (0, 0.5), (20, 0.25))])
    assert (band.x.tolist(), band.low.tolist(), band.high.tolist()) == ([0, 20], [0.25, 0.25], [0.5, 0.5])
    assert band.label == "2 seeds"


def test_a_table_says_what_every_recipe_has_learned(tmp_path: Path) -> None:
    (tmp_path / "stale-4").mkdir()
    for seed, last in ((1, 0.5), (2, 0.75)):
        run = _learned(seed, (0, 0.25), (20, last), recipe="stale-4")
        (tmp_path / f"stale-4/seed-{seed}.json").write_text(json.dumps(run.__dict__))
    *_, row = table(tmp_path)
    assert row == "| stale-4 | 2 | 0.250 (0.250 to 0.250) | 0.625 (0.500 to 0.750) | 1 |"


def test_every_recipe_is_drawn_beside_grpo(tmp_path: Path) -> None:
    for recipe in ("demo", "remax"):
        (tmp_path / "kept" / recipe).mkdir(parents=True)
        for seed in (1, 2):
            run = _learned(seed, (0, 0.25), (20, 0.5), recipe=recipe)
            (tmp_path / "kept" / recipe / f"seed-{seed}.json").write_text(json.dumps(run.__dict__))
    drawn = list(draw_curves(tmp_path / "kept", tmp_path / "curves"))
    assert [path.name for path in drawn] == ["demo.svg", "remax.svg"]
    demo, remax = (ElementTree.parse(path).getroot() for path in drawn)
    texts = ["".join(root.itertext()) for root in (demo, remax)]
    assert "grpo" not in texts[0] and "grpo" in texts[1] and "2 seeds" in texts[1]
    assert "var(" not in drawn[1].read_text()


ONE_SEED = ("code.code", "context-parallel", "four-ranks", "fp8", "fp8-training", "routing-replay", "tools")
"""Recipes that learn at all, which is what their curves show."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.glob("*") if path.is_dir()))
def test_what_is_kept_is_of_a_recipe_that_is_there_and_of_three_seeds(folder: str) -> None:
    runs = read(RESULTS, folder)
    assert {run.seed for run in runs} == ({1} if folder in ONE_SEED else {1, 2, 3})
    for run in runs:
        path = ROOT / run.command.split()[2]
        assert folder == run.recipe
        recipe, _, learner = folder.partition(".")
        assert path.stem == recipe
        recipes = load_recipes(path)
        assert not learner or learner in recipes or any(learner in settings.evaluation for settings in recipes.values())
