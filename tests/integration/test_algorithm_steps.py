"""Two steps of each algorithm, and of its variants, are those recorded and can be made again from their samples."""

from __future__ import annotations

import pytest

from tests.integration.algorithm_steps import CASES, REPRESENTATIVE, SteppedCases, recorded_as, run_cases_apart
from tests.integration.reference_runs import expect_recorded
from tests.integration.replayed_steps import expect_replayed

pytestmark = pytest.mark.processes

FURTHER = [name for name in CASES if name not in REPRESENTATIVE]
NAMES = [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> SteppedCases:
    """Values of two steps of the representative cases, on roles that were started once."""
    return run_cases_apart(tmp_path_factory.mktemp("steps"), *REPRESENTATIVE)


@pytest.fixture(scope="module")
def stepped_further(tmp_path_factory: pytest.TempPathFactory) -> SteppedCases:
    """Values of two steps of the other cases."""
    return run_cases_apart(tmp_path_factory.mktemp("steps"), *FURTHER)


@pytest.fixture
def stepped_with(name: str, request: pytest.FixtureRequest) -> SteppedCases:
    """Values of a case and of those that are stepped with it."""
    cases: SteppedCases = request.getfixturevalue("stepped" if name in REPRESENTATIVE else "stepped_further")
    return cases


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_each_algorithm_are_those_recorded(name: str, stepped_with: SteppedCases) -> None:
    expect_recorded(recorded_as(name), stepped_with.values[name])


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_each_algorithm_are_made_again_from_their_samples(name: str, stepped_with: SteppedCases) -> None:
    expect_replayed(stepped_with.directory / name)


def test_a_correction_of_the_same_weights_changes_next_to_nothing(stepped: SteppedCases) -> None:
    plain, masked, ahead = (stepped.values[name]["metrics"] for name in ("grpo", "grpo-icepop", "grpo-corrected"))
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


def test_samples_of_older_weights_are_weighed_by_how_far_the_policy_has_moved(stepped: SteppedCases) -> None:
    _, values = stepped.values["grpo-corrected"]["metrics"]
    assert values["rollout/staleness_mean"] == 1
    assert values["correction/weight_max"] == 2.0 and values["correction/truncated_fraction"] > 0
    assert values["correction/weight_min"] < 0.9
    assert values["correction/effective_samples"] < 0.95
    assert "mismatch/logprob_abs_diff_mean" not in values  # which is of the same weights


def test_tokens_that_a_correction_leaves_out_are_not_chosen(stepped: SteppedCases) -> None:
    uncorrected, corrected = stepped.values["kl_cov-corrected"]["metrics"]
    assert uncorrected["train/selected_fraction"] == pytest.approx(
        0.2, abs=0.02
    )  # a fifth of two mini-batches, rounded down
    left = 1 - corrected["correction/masked_low_fraction"] - corrected["correction/masked_high_fraction"]
    assert 0 < left < 0.5
    assert 0 < corrected["train/selected_fraction"] <= 0.2 * left


def test_prompts_of_equal_rewards_are_drawn_again(stepped: SteppedCases) -> None:
    steps = stepped.values["rloo-dynamic"]["metrics"]
    for step in steps:
        outcomes = ("used", "filtered", "failed", "surplus")
        assert step["sampling/drawn_prompts"] == sum(step[f"sampling/{outcome}_prompts"] for outcome in outcomes)
        assert step["sampling/used_prompts"] == 8
    assert max(step["sampling/rounds"] for step in steps) > 1
    for columns in stepped.values["rloo-dynamic"]["columns"]:
        assert len(columns["group_ids"]) == 16 and all(columns["advantages"])


def test_a_step_of_which_a_correction_leaves_nothing_updates_nothing(stepped: SteppedCases) -> None:
    kept, lost = stepped.values["grpo-bypass"]["metrics"]
    assert (kept["correction/empty_updates"], kept["correction/lost_samples"]) == (0, 0)
    assert "train/policy_loss" in kept
    assert (lost["correction/empty_updates"], lost["correction/lost_samples"]) == (2, 1)
    assert lost["correction/effective_samples"] == 0
    assert not {"train/policy_loss", "train/gradient_norm", "train/skipped_updates"} & lost.keys()
    assert lost["reward/mean"] > 0  # whose rewards are what they are
