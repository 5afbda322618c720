"""Shares of a step's time, from metrics and spans made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import drawn_reward, step
from hybridflow.config.recipe import load_recipe
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.metrics.device_samples import DeviceSample
from hybridflow.metrics.timeline import TimelineSpan
from hybridflow.report.run_data import Phase, RunData, Series


def _run() -> RunData:
    """A first step of 100 s, and two of 10 s: 5 s of rollout, 3 s of training, a second of each to move memory."""

    def series(first: float, *others: float) -> Series:
        return Series(np.array([1.0, 2.0, 3.0]), np.array([first, *others]))

    by_metric = {
        "train/step_time_ms": series(100_000, 10_000, 10_000),
        "rollout/time_ms": series(60_000, 5_000, 5_000),
        "reward/latency_ms": series(1_000, 100, 300),
        "train/update_time_ms": series(30_000, 3_000, 3_000),
        "sync/time_ms": series(1_000, 700, 700),
        "sync/verify_ms": series(500, 200, 200),
        "step/device_tokens_per_sec": series(1.0, 10.0, 30.0),
        "device/power_mean_w": series(1.0, 500.0, 600.0),
    }
    served = [TimelineSpan("rollout", 0, "commit_weights", at - 0.1, at) for at in (0.0, 100.0, 110.0, 120.0)]
    moves = [
        TimelineSpan("actor", rank, "offload", at, at + 0.3 + 0.1 * rank)
        for at in (50.0, 100.5, 110.5)
        for rank in (0, 1)
    ]
    moves += [TimelineSpan("rollout", 0, "onload", at, at + 0.6) for at in (51.0, 101.0, 111.0)]
    moves += [TimelineSpan("rollout", 0, "offload", at, at + 1.0) for at in (60.0, 106.0, 116.0)]
    work = [TimelineSpan("rollout", 0, "generate", at, at + 3.0) for at in (1.0, 101.6, 111.6)]
    work += [TimelineSpan("actor", 0, "update", at, at + 2.0) for at in (70.0, 107.0, 117.0)]
    samples = [
        DeviceSample(at, "node", 0, 50.0, memory, 400.0, 1000.0)
        for at, memory in ((2.0, 999), (102.0, 40), (105.0, 7), (107.5, 80), (118.0, 90), (119.5, 3))
    ]
    spans = sorted(served + moves + work, key=lambda span: span.begin)
    return RunData("run", {"train": Phase(3, by_metric)}, spans=spans, samples=samples)


def test_phases_add_up_to_the_step_and_leave_the_first_out() -> None:
    steps = step.measure(_run(), 1)
    assert steps.seconds == 10.0
    assert steps.phases == pytest.approx(
        {
            "rollout": 5.0 - 0.4 - 0.6,  # the slowest rank gave memory back, and the engine took it
            "rewards": 0.2,
            "log-probs": 0.0,
            "training": 3.0 - 1.0,
            "weight transfer": 0.5,
            "offload": 1.4,
            "onload": 0.6,
            "everything else": 10.0 - 4.0 - 0.2 - 2.0 - 0.5 - 2.0,
        }
    )
    assert steps.device_throughput == 20.0 and steps.mfu is None
    assert steps.devices == {"device/power_mean_w": 550.0}
    assert steps.peak_bytes == {"rollout": 40, "training": 90, "everything else": 7}
    stats = step.measurements(steps)
    assert stats["neither_rollout_nor_training"] == pytest.approx(0.4)
    assert stats["bound_tokens_per_s_per_device"] == pytest.approx(20.0 * 10 / 6)
    assert step.lines(steps)[0].split() == ["rollout", "4.000", "s", "40.0%"]
    assert step.lines(steps)[-1].split() == ["step", "10.000", "s", "100.0%"]


def test_rates_are_over_the_time_of_all_steps() -> None:
    """Tokens in the seconds of all steps, where a mean of the steps' rates would be 30."""
    run = _run()
    by_metric = run.phases["train"].series
    steps = np.array([1.0, 2.0, 3.0])
    changed = {
        "train/step_time_ms": Series(steps, np.array([1e5, 10_000, 30_000])),
        "step/device_tokens_per_sec": Series(steps, np.array([1.0, 50.0, 10.0])),
        "train/update_time_ms": Series(steps, np.array([1e5, 1_000, 3_000])),
        "train/mfu": Series(steps, np.array([0.1, 0.4, 0.2])),
        "device/power_mean_w": Series(steps, np.array([1.0, 400.0, 600.0])),
        "device/energy_j": Series(steps, np.array([1.0, 4000.0, 18000.0])),
    }
    measured = step.measure(replace(run, phases={"train": Phase(3, {**by_metric, **changed})}), 1)
    assert measured.device_throughput == (50 * 10 + 10 * 30) / 40
    assert measured.mfu == pytest.approx((0.4 * 1 + 0.2 * 3) / 4)
    assert measured.devices == {"device/power_mean_w": 550.0, "device/energy_j": 11000.0}


def test_rollout_during_training_counts_once() -> None:
    run = _run()
    ahead = [TimelineSpan("rollout", rank, "generate", 108.5 + rank, 112.0) for rank in (0, 1)]  # training ends at 109
    steps = step.measure(replace(run, spans=sorted([*run.spans, *ahead], key=lambda span: span.begin)), 1)
    assert steps.overlap == pytest.approx(0.5 / 2)
    assert step.measurements(steps)["neither_rollout_nor_training"] == pytest.approx(0.4 + 0.025)
    assert step.measure(run, 1).overlap == 0.0


@pytest.mark.slow
def test_a_picture_for_each_gpu(tmp_path: Path) -> None:
    (path,) = step.draw(_run(), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_prompts_have_one_length_and_end_with_their_question() -> None:
    examples = step.prompts(20, 64, seed="train")
    assert {len(example.prompt) for example in examples} == {64}
    assert set("".join(example.prompt for example in examples)) <= set(ARITHMETIC_CHARACTERS)
    for example in examples:
        left, right = example.prompt.removesuffix("=").rpartition("=")[2].split("+")
        assert int(left) + int(right) == int(example.answer)
    assert len({example.prompt for example in examples}) == 20
    assert json.dumps(examples[0].prompt) != json.dumps(step.prompts(1, 64, seed="eval")[0].prompt)


def test_prompts_are_of_all_characters_that_the_tokenizer_knows() -> None:
    four = load_recipe("launch/recipes/qwen3-30b-a3b-4xh200.yaml")
    alphabet = step._alphabet(four)
    assert len(alphabet) == 95
    made = step.prompts(20, 1024, seed="a", alphabet=alphabet)
    assert {len(example.prompt) for example in made} == {1024} and all(example.prompt.endswith("=") for example in made)
    assert len(set("".join(example.prompt for example in made))) == 95
    # One that knows the characters of sums alone has sums.
    assert step._alphabet(load_recipe("launch/recipes/demo.yaml")) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-tokens", "4"], "--prompt-tokens of at least 8"),
        (["--directory", "."], "is there already"),
        (["trainer.stepz=1"], "stepz"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.main(["launch/recipes/demo.yaml", "--directory", str(tmp_path / "new"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_rewards_differ_between_responses() -> None:
    rewards = drawn_reward.score(["1", "2", "", "\ud800"])
    assert len(set(rewards)) == 4 and all(0 <= reward < 1 for reward in rewards)
    assert rewards == drawn_reward.score(["1", "2", "", "\ud800"])
