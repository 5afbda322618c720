"""Steps of every algorithm, on every kind of placement, are what they were when they were recorded.

Bit for bit: losses, gradient norms, rewards, texts and exported weights of every run, and log-probs, values, advantages
and returns where `PPOTrainer` shows them. One thread a process, and a deterministic engine, make two runs the same.

On a processor of another vendor, family or instruction set, kernels sum in another order. There floats are compared
with a tolerance, and weights by their norms: the first steps of Adam follow the sign of each gradient, and where a
gradient is nearly 0 its sign depends on that order. Tokens must be the same there too: a draw so close to the edge
of a token's probability is improbable.

With other versions of torch, Megatron-Core or SGLang nothing can be said: the values are to be recorded anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.algorithms.registry import ALGORITHMS
from tests.integration.algorithm_steps import CASES as STEPPED
from tests.integration.algorithm_steps import recorded_as, run_cases_apart
from tests.integration.reference_runs import (
    CASES,
    RELATIVE,
    VALUES,
    differences,
    expect_recorded,
    run_case,
    without_digests,
)
from tests.integration.replayed_steps import REPLAYED

OTHERS = {"ppo-split": pytest.mark.long, "ppo-colocate": pytest.mark.long} | dict.fromkeys(
    ("grpo-one-step-apart", "ppo-standalone", "remax-standalone", "remax-colocate", "safe_rlhf-colocate"),
    pytest.mark.release,
)
"""Of an algorithm that another case, or one of two steps, has as well, on other devices."""


def test_every_algorithm_has_a_case() -> None:
    assert {name.split("-")[0] for name in (*CASES, *STEPPED)} == set(ALGORITHMS)
    assert {path.stem for path in VALUES.glob("*.json")} == set(CASES)
    assert {path.stem for path in VALUES.glob("steps/*.json")} == set(STEPPED)


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(each, marks=OTHERS.get(each, ())) for each in CASES])
def test_values_are_those_recorded(name: str, tmp_path: Path) -> None:
    expect_recorded(name, run_case(name, tmp_path))


@pytest.fixture(scope="module")
def steps_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def stepped(steps_directory: Path) -> dict[str, Any]:
    """What two steps of each algorithm found, on roles that were started once."""
    return run_cases_apart(steps_directory)


@pytest.mark.processes
@pytest.mark.parametrize("name", STEPPED)
def test_two_steps_of_each_algorithm_are_those_recorded(name: str, stepped: dict[str, Any]) -> None:
    expect_recorded(recorded_as(name), stepped[name])


_NOT_FOUND_AGAIN = {
    "dapo": {"rollout", "reward", "sampling"},
    "dapo-overlong": {"rollout", "reward", "sampling"},
    "rloo-dynamic": {"rollout", "reward", "sampling"},
    "pf_ppo": {"rollout", "reward", "sampling", "replay"},
    "dpo-group": {"rollout", "reward", "preference"},
}
"""Groups of figures of samples that were drawn and not learned from, by case."""


@pytest.mark.processes
@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("name", STEPPED)
def test_two_steps_of_each_algorithm_are_made_again_from_their_samples(name: str, steps_directory: Path) -> None:
    found = json.loads((steps_directory / name / REPLAYED).read_text())
    assert found["differing"] == []
    assert any(step["compared"] for step in found["steps"])
    for step in found["steps"]:
        assert step["weights"] and step["differing"] == []
        not_made = {each for each in step["not_made"] if not each.endswith(("/failed", "/dropped"))}
        assert {each.partition("/")[0] for each in not_made} <= _NOT_FOUND_AGAIN.get(name, set())


@pytest.mark.processes
def test_a_correction_of_the_same_weights_changes_next_to_nothing(stepped: dict[str, Any]) -> None:
    plain, masked, ahead = (stepped[name]["metrics"] for name in ("grpo", "grpo-icepop", "grpo-corrected"))
    for values in (*masked, ahead[0]):
        assert values["rollout/staleness_mean"] == 0
        assert values["correction/weight_min"] == pytest.approx(1, abs=1e-3)
        assert values["correction/weight_max"] == pytest.approx(1, abs=1e-3)
        assert values["correction/lost_samples"] == values["correction/vetoed_fraction"] == 0
    # The same log-probs are recomputed, as both have two updates a step.
    for mine, other in zip(masked, plain, strict=True):
        assert mine["train/policy_loss"] == pytest.approx(other["train/policy_loss"], abs=1e-5)
    name = "mismatch/logprob_abs_diff_mean"
    assert masked[0][name] == plain[0][name]
    # The weights of the second step are of two losses, whose roundings differ on some processors.
    assert 0 < masked[1][name] < 1e-5 and masked[1][name] == pytest.approx(plain[1][name], rel=0.5)


@pytest.mark.processes
def test_samples_of_older_weights_are_weighed_by_how_far_the_policy_has_moved(stepped: dict[str, Any]) -> None:
    _, values = stepped["grpo-corrected"]["metrics"]
    assert values["rollout/staleness_mean"] == 1
    assert values["correction/weight_max"] == 2.0 and values["correction/truncated_fraction"] > 0
    assert values["correction/weight_min"] < 0.9
    assert values["correction/effective_samples"] < 0.95
    assert "mismatch/logprob_abs_diff_mean" not in values  # which is of the same weights


@pytest.mark.processes
def test_tokens_that_a_correction_leaves_out_are_not_chosen(stepped: dict[str, Any]) -> None:
    whole, corrected = stepped["kl_cov-corrected"]["metrics"]
    assert whole["train/selected_fraction"] == pytest.approx(0.2, abs=0.02)  # a fifth of two mini-batches, rounded down
    left = 1 - corrected["correction/masked_low_fraction"] - corrected["correction/masked_high_fraction"]
    assert 0 < left < 0.5
    assert 0 < corrected["train/selected_fraction"] <= 0.2 * left


@pytest.mark.processes
def test_prompts_of_equal_rewards_are_drawn_again(stepped: dict[str, Any]) -> None:
    steps = stepped["rloo-dynamic"]["metrics"]
    for step in steps:
        parts = ("used", "filtered", "failed", "surplus")
        assert step["sampling/drawn_prompts"] == sum(step[f"sampling/{part}_prompts"] for part in parts)
        assert step["sampling/used_prompts"] == 8
    assert max(step["sampling/rounds"] for step in steps) > 1
    for columns in stepped["rloo-dynamic"]["columns"]:
        assert len(columns["group_ids"]) == 16 and all(columns["advantages"])


@pytest.mark.processes
def test_a_step_of_which_a_correction_leaves_nothing_updates_nothing(stepped: dict[str, Any]) -> None:
    kept, lost = stepped["grpo-bypass"]["metrics"]
    assert (kept["correction/empty_updates"], kept["correction/lost_samples"]) == (0, 0)
    assert "train/policy_loss" in kept
    assert (lost["correction/empty_updates"], lost["correction/lost_samples"]) == (2, 1)
    assert lost["correction/effective_samples"] == 0
    assert not {"train/policy_loss", "train/gradient_norm", "train/skipped_updates"} & lost.keys()
    assert lost["reward/mean"] > 0  # whose rewards are what they are


def test_a_changed_bit_is_a_difference() -> None:
    expected = {"metrics": [{"step": 1, "loss": 0.1}], "model": {"weight": ["digest", 2.0]}}
    found = {"metrics": [{"step": 1, "loss": 0.1 + 2**-56}], "model": {"weight": ["other", 2.0]}}
    assert differences(found, expected) == [
        "/metrics/0/loss: 0.10000000000000002, expected 0.1",
        "/model/weight/0: 'other', expected 'digest'",
    ]
    assert not differences(without_digests(found), without_digests(expected), relative=RELATIVE)
    assert differences({"step": 1}, {"loss": 1}) == ["/loss: only in one of the two", "/step: only in one of the two"]
    assert differences([1], [1, 2]) == [": 1 values, expected 2"]
