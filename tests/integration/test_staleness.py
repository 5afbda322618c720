"""Rollout one step ahead of training: what overlaps, how old samples are, and that a kill loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.kill_harness import Comparison, Kill, KilledRun, compare
from hybridflow.checkpoint.driver_state import read_batch
from hybridflow.config.initial_model import create_model
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.timeline import read_spans, step_ends
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import DEMO, ROOT, SMALL, records, rewarded_by_length, run_recipe
from tests.support.warm import warm_python

STEPS = 4
AHEAD = [
    f"trainer.steps={STEPS}",
    "trainer.max_staleness=1",
    "evaluation.eval.interval=2",
    "placement.rollout=cpu:2",
    "checkpoint.save_interval=1",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [DEMO, *SMALL, *AHEAD, rewarded_by_length(tmp_path_factory.mktemp("rewards"))]


@pytest.fixture(scope="module")
def uninterrupted(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """A run that was never interrupted."""
    run = KilledRun(tmp_path_factory.mktemp("whole"), recipe, interpreter=warm_python())
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    return run


@pytest.mark.long
@pytest.mark.processes
def test_engines_generate_the_next_rollout_while_the_actor_learns(uninterrupted: KilledRun) -> None:
    directory = uninterrupted.run_directory
    train = records(directory, "train")
    assert [record["rollout/staleness_mean"] for record in train] == [0, 1, 1, 1]
    # The first rollout is of the very weights that learn from it; the ratio to an older policy is no constant.
    assert train[0]["train/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert all(abs(record["train/approx_kl_k3"]) > 1e-6 for record in train[1:])
    assert all("rollout/wait_ms" in record and "mismatch/logprob_abs_diff_mean" not in record for record in train)
    spans = read_spans(directory / "timeline.json")
    begun = []
    for begin, end in pairwise(step_ends(spans)):
        within = [span for span in spans if begin < span.begin < end]
        learned = max(span.end for span in within if span.method == "update")
        begun.append(sum(span.method == "generate" and span.begin < learned for span in within))
    # Before the last update: an evaluation and its own rollout in the first step, and another evaluation in the third;
    # and the rollout of the step after it, but for the last.
    assert begun == [2 + 1, 1, 1 + 1, 0]


@pytest.mark.long
@pytest.mark.processes
def test_every_prompt_is_drawn_once_and_a_checkpoint_holds_what_was_made_ahead(uninterrupted: KilledRun) -> None:
    seen = []
    for step in range(STEPS + 1):
        checkpoint = uninterrupted.run_directory / "checkpoints" / f"step-{step:08d}"
        state = json.loads((checkpoint / "driver.json").read_text())
        ahead = 1 if 0 < step < STEPS else 0
        assert state["sampler"]["position"] == 8 * (step + ahead)
        assert (state["groups"] is not None) == ahead
        if ahead:
            batch = read_batch(checkpoint / state["groups"]["ended"])
            assert set(batch.policy_versions.tolist()) == {state["policy_version"] - 1}
            assert batch.group_ids.unique().tolist() == list(range(8 * step, 8 * step + 8))
            seen += batch.sample_ids.tolist()
    assert len(seen) == len(set(seen)) == (STEPS - 1) * 32


@pytest.mark.long
@pytest.mark.processes
def test_a_killed_run_learns_from_the_rollout_that_was_made_ahead(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    run = KilledRun(tmp_path, recipe, interpreter=warm_python())
    outcome = run.run(Kill("driver", "update", 3, 0.0))
    assert outcome.killed, run.output
    assert not outcome.left_over
    assert any(span.method == "update" for span in read_spans(run.run_directory / "timeline.json"))
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert "resume: after step " in run.output  # 2, or 1 where the save of 2 was still under way
    assert compare(run, uninterrupted) == Comparison(identical=True, lost=0, duplicated=0)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.release
def test_with_other_data_what_was_made_ahead_is_made_again(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    checkpoint = uninterrupted.run_directory / "checkpoints" / "step-00000002"
    other = [
        "name=other",
        f"resume={checkpoint}",
        "checkpoint.accept=[data.arithmetic]",
        "data.arithmetic.train_size=24",
    ]
    done = run_recipe(DEMO, tmp_path, *recipe[1:], *other, "trainer.steps=3")
    assert done.returncode == 0, done.stderr
    [record] = records(tmp_path / "other", "train")
    assert (record["step"], record["rollout/staleness_mean"]) == (3, 0)
    state = json.loads((tmp_path / "other" / "checkpoints" / "step-00000003" / "driver.json").read_text())
    assert state["sampler"] == {"count": 24, "seed": state["sampler"]["seed"], "position": 24}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.release
def test_without_staleness_what_was_made_ahead_is_made_again(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    checkpoint = uninterrupted.run_directory / "checkpoints" / "step-00000002"
    others = ("name=other", f"resume={checkpoint}", "trainer.max_staleness=0", "trainer.steps=3", "samples.store=true")
    done = run_recipe(DEMO, tmp_path, *recipe[1:], *others)
    assert done.returncode == 0, done.stderr
    [record] = records(tmp_path / "other", "train")
    assert (record["step"], record["rollout/staleness_mean"]) == (3, 0)
    state = json.loads((tmp_path / "other" / "checkpoints" / "step-00000003" / "driver.json").read_text())
    assert state["sampler"]["position"] == 24  # the same prompts


OWN_LOOP = """
from hybridflow import PPOTrainer, get_ppo_config

if __name__ == "__main__":
    config = get_ppo_config(
        batch_size=4, mini_batch_size=2, kl_coef=0.0, max_steps=2, max_new_tokens=4, lr=1e-3,
        actor_device_mapping="cpu:0", rollout_device_mapping="cpu:1", recipe={"trainer": {"max_staleness": 1}},
    )
    prompts = [f"{number}+{number}=" for number in range(8)]
    reward = lambda generated_texts: [float(len(text)) for text in generated_texts]
    with PPOTrainer(config, model="model", reward_fn=reward, prompts=prompts) as trainer:
        figures = [trainer.update(trainer.rollout()) for _ in range(2)]
    assert [each["rollout/staleness_mean"] for each in figures] == [0, 1], figures
    assert figures[1]["train/approx_kl_k3"] > 1e-6, figures
    assert "mismatch/logprob_abs_diff_mean" not in figures[1]
    for each, own in zip(figures, (["rollout/time_ms"], []), strict=True):  # the second was made beside the first
        parts = [each[name] for name in (*own, "reward/latency_ms", "train/update_time_ms")]
        assert sum(parts) < each["train/step_time_ms"] and each["step/device_tokens_per_sec"] > 0, each
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_loop_of_ones_own_learns_from_old_samples_as_such(tmp_path: Path) -> None:
    create_model(load_recipe(DEMO).model, tmp_path / "model", seed=0)
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [warm_python(), "loop.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_cannot_run_ahead_is_refused(tmp_path: Path) -> None:
    common = [f"run_dir={tmp_path}", *SMALL, "trainer.max_staleness=1"]
    with pytest.raises(SettingsError, match=r"rollout and placement\.actor both on cpu:0 of node 0, expected"):
        check_recipe(load_recipe(DEMO, common))
    check_recipe(load_recipe(DEMO, [*common, "placement.rollout=cpu:2"]))
    with pytest.raises(SettingsError, match=r"max_staleness=1 with algorithm\.name=remax, .* expected 0"):
        load_recipe(DEMO, [*common, "placement.rollout=cpu:2", "algorithm.name=remax"])
    guarded = ["placement.rollout=cpu:2", "algorithm.kl_guard=0.1", "trainer.epochs=2"]
    with pytest.raises(SettingsError, match=r"algorithm\.kl_guard is set with trainer\.max_staleness=1"):
        load_recipe(DEMO, [*common, *guarded])
    with pytest.raises(SettingsError, match="max_staleness"):
        load_recipe(DEMO, [*common, "trainer.max_staleness=2"])
    traced = ["placement.rollout=cpu:2", "trainer.profile={steps: [1], rollout_steps: 4}"]
    with pytest.raises(SettingsError, match=r"profile\.rollout_steps=4 with trainer\.max_staleness=1, .* expected 0"):
        load_recipe(DEMO, [*common, *traced])
    with pytest.raises(SettingsError, match=r"profile\.rollout_steps=4 with rollout\.stream, .* expected 0"):
        load_recipe(DEMO, [*common, *traced, "rollout.stream={}"])
