"""Algorithms that draw prompts or samples as they need them: killed and resumed, they draw the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.kill_harness import Comparison, Kill, KilledRun, compare
from hybridflow.checkpoint.driver_state import read_batch
from tests.integration.algorithm_steps import TEACHER, make_teacher
from tests.support.runs import ROOT, SMALL, records
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.long]

STEPS = 4
COMMON = [
    *SMALL,
    f"trainer.steps={STEPS}",
    "evaluation.eval.before_train=false",
    "checkpoint.save_interval=1",
    "placement={actor: cpu:0, rollout: cpu:1}",
    "train.layout.ep=1",
]
GIVEN = [
    *("name=small", "warmup.steps=2", "data.arithmetic.train_size=20", "train.layout.ep=1", "placement={actor: cpu:0}"),
    *(
        f"trainer.steps={STEPS}",
        "trainer.prompts_per_step=8",
        "evaluation.eval.prompts=16",
        "evaluation.eval.interval=2",
    ),
    "checkpoint.save_interval=1",
]
"""Overrides of a recipe whose data have the responses."""
WITH_CRITIC = ["critic.train.layout.ep=1", "algorithm.critic_warmup_steps=0"]
REWARDS = """def score(generated_texts, prompts):
    # Equal for about half of the prompts, so that groups are left out.
    return [len(text) / 4 if prompt[1] in "13579" else 1.0 for prompt, text in zip(prompts, generated_texts)]
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "some.py"
    path.write_text(REWARDS)
    return f'reward.functions=[{{name: some, path: "{path}:score"}}]'


def a_run(directory: Path, name: str, *overrides: str) -> KilledRun:
    recipe = str(ROOT / f"launch/recipes/algorithms/{name}.yaml")
    return KilledRun(directory, [recipe, *overrides], interpreter=warm_python())


def uninterrupted_and_killed(directory: Path, name: str, *overrides: str, common: Sequence[str] = COMMON) -> Path:
    """The directory of a run that was never interrupted, and whose like was killed in step 3 and resumed."""
    uninterrupted, run = (a_run(directory / folder, name, *common, *overrides) for folder in ("whole", "killed"))
    outcome = uninterrupted.run()
    assert outcome.exit_code == 0, uninterrupted.output
    outcome = run.run(Kill("driver", "update", 3, 0.0))
    assert outcome.killed and not outcome.left_over, run.output
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert "resume: after step " in run.output
    assert compare(run, uninterrupted) == Comparison(identical=True, lost=0, duplicated=0)
    return uninterrupted.run_directory


@pytest.mark.release
def test_dynamic_sampling_draws_the_same_prompts(reward: str, tmp_path: Path) -> None:
    directory = uninterrupted_and_killed(tmp_path, "dapo", reward)
    steps, position = records(directory, "train"), 0
    for step in steps:
        position += step["sampling/drawn_prompts"]
        assert step["sampling/used_prompts"] == 8
        outcomes = ("used", "filtered", "failed", "surplus")
        assert step["sampling/drawn_prompts"] == sum(step[f"sampling/{outcome}_prompts"] for outcome in outcomes)
        state = json.loads((directory / f"checkpoints/step-{step['step']:08d}/driver.json").read_text())
        assert state["sampler"]["position"] == position
        assert state["samples_drawn"] == 4 * position + (16 if step["step"] == STEPS else 0)  # and of an evaluation
    assert max(step["sampling/rounds"] for step in steps) > 1
    assert sum(step["sampling/filtered_prompts"] for step in steps) > 0


@pytest.mark.release
def test_a_replay_buffer_gives_the_same_samples(reward: str, tmp_path: Path) -> None:
    directory = uninterrupted_and_killed(tmp_path, "pf_ppo", reward, "algorithm.replay_buffer_size=40", *WITH_CRITIC)
    steps = records(directory, "train")
    assert [step["replay/share"] > 0 for step in steps] == [False, True, True, True]
    assert [step.get("replay/age_mean", 0) > 0 for step in steps] == [False, True, True, True]
    # The ratio of samples of older policies is no constant.
    assert steps[0]["train/ratio_mean"] == pytest.approx(1, abs=0.1)
    for step in steps:
        kept = read_batch(directory / f"checkpoints/step-{step['step']:08d}/replay.safetensors")
        assert len(kept) == step["replay/size"] <= 40
        assert kept.rewards is not None and kept.policy_versions.max() == step["step"]
        assert len(kept.sample_ids.unique()) == len(kept)


def test_choices_and_coefficients_go_on(reward: str, tmp_path: Path) -> None:
    """Tokens that are drawn, an adaptive coefficient and a schedule are those of the run that was not killed."""
    directory = uninterrupted_and_killed(
        tmp_path,
        "clip_cov",
        reward,
        "algorithm.clip_cov_fraction=0.2",
        "algorithm.clip_cov_low=0",
        "algorithm.entropy_controller=adaptive",
        "algorithm.entropy_target=9",
        "algorithm.schedules.clip_high={shape: linear, to: 0.4, over: 2}",
        "trainer.mini_batches=2",
    )
    steps = records(directory, "train")
    assert [step["train/entropy_coef"] for step in steps] == pytest.approx([0, 1e-4, 2e-4, 3e-4])
    assert [step["train/clip_high"] for step in steps] == pytest.approx([0.2, 0.3, 0.4, 0.4])
    assert all(step["train/selected_fraction"] > 0 for step in steps)


@pytest.mark.release
def test_the_reference_of_given_pairs_is_asked_once(tmp_path: Path) -> None:
    """Before the first update, so that margins are 0 there; a resumed run has its log-probs from the checkpoint."""
    directory = uninterrupted_and_killed(tmp_path, "dpo", "trainer.mini_batches=2", common=GIVEN)
    evaluations, steps = records(directory, "eval"), records(directory, "train")
    assert [evaluation["eval/preference_margin"] == 0 for evaluation in evaluations] == [True, False, False]
    assert [record["preference/examples"] for record in steps] == [8] * STEPS
    kept = [load_file(directory / f"checkpoints/step-{step:08d}/kept.safetensors") for step in range(1, STEPS + 1)]
    assert {name: tuple(column.shape) for name, column in kept[0].items()} == {
        "reference.train.pair": (20, 2),
        "reference.evaluation.pair": (16, 2),
    }
    for columns in kept[1:]:
        assert all(torch.equal(column, kept[0][name]) for name, column in columns.items())
    output = (tmp_path / "killed/output.log").read_text()
    assert output.count("reference: log-probs of 72 responses") == 1
    # There is no engine, and no rank of rewards.
    assert {path.name.partition("-")[0] for path in (directory / "logs").iterdir()} == {"actor"}


@pytest.mark.release
def test_a_student_goes_on_from_samples_of_older_weights(tmp_path: Path) -> None:
    """The engines are a step ahead, and the teacher leaves its device, which is the actor's, between its turns."""
    make_teacher(tmp_path)
    directory = uninterrupted_and_killed(
        tmp_path,
        "distillation",
        f"teacher={{path: {tmp_path / TEACHER}, offload: true, train: {{layout: {{tp: 1}}, dtype: float32}}}}",
        "trainer.max_staleness=1",
    )
    steps = records(directory, "train")
    assert [step["rollout/staleness_mean"] for step in steps] == [0, 1, 1, 1]
    assert all(step["memory/teacher_offload_ms"] > 0 < step["memory/teacher_onload_ms"] for step in steps)
    assert all(step["distillation/kl_k3"] > 0 < step["train/gradient_norm"] for step in steps)
