"""Groups that a step trains on, and the account of every prompt."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine3d.errors import EngineError
from hybridflow.algorithms.config import load
from hybridflow.algorithms.dapo import DAPOSettings
from hybridflow.algorithms.dynamic_sampling import GroupKind, SamplingTally, group_kinds, next_round, rewarded_samples
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.metrics import names as metrics
from tests.support.steps import NumberedStep, Reward, ids

GOOD, RIGHT, WRONG, OUTSIDE_LOSS = GroupKind


def test_kinds_of_groups_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5, -1.0, 0.0, 1.0, 0.0, -1.0])
    groups = torch.tensor([7, 2, 7, 4, 9, 2, 5, 5, 9])
    assert group_kinds(rewards, groups) == {2: WRONG, 4: RIGHT, 5: GOOD, 7: RIGHT, 9: WRONG}
    assert list(group_kinds(rewards, groups)) == [2, 4, 5, 7, 9]
    in_loss = torch.tensor([True] * 6 + [False, False, True])
    assert group_kinds(rewards, groups, in_loss)[5] is OUTSIDE_LOSS
    in_loss[6] = True  # one of two that differ is enough
    assert group_kinds(rewards, groups, in_loss)[5] is GOOD


def test_equal_is_equal_to_the_last_bit() -> None:
    reward = torch.tensor(0.1)
    above = torch.nextafter(reward, torch.tensor(1.0))
    groups = torch.zeros(3, dtype=torch.int64)
    assert group_kinds(torch.stack([reward] * 3), groups) == {0: RIGHT}
    assert group_kinds(torch.stack([reward, above, reward]), groups) == {0: GOOD}


def test_rewards_that_are_no_numbers_and_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="the reward of row 1 is nan"):
        group_kinds(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="group_ids has shape"):
        group_kinds(torch.tensor([0.0, 1.0]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"the mask is torch\.int64"):
        group_kinds(torch.tensor([0.0]), torch.tensor([0]), torch.tensor([1]))


def test_how_many_prompts_a_round_draws() -> None:
    config = DAPOSettings()
    assert next_round(SamplingTally(), 8, config) == 8
    assert next_round(SamplingTally(rounds=1, drawn=8, used=6), 8, config) == 3  # 2 missing of which 3 in 4 are good
    assert next_round(SamplingTally(rounds=1, drawn=8, used=1), 8, config) == 8  # 56 would be expected to fill it
    assert next_round(SamplingTally(rounds=1, drawn=8), 8, config) == 8
    missing = DAPOSettings(dynamic_sampling_draw="missing")
    assert next_round(SamplingTally(rounds=1, drawn=8, used=1), 8, missing) == 7
    for settings in (config, missing):  # a prompt for each of four engines
        assert next_round(SamplingTally(rounds=1, drawn=8, used=7), 8, settings, least=4) == 4


def test_every_engine_gets_a_prompt_in_every_round() -> None:
    for draw in ("expected", "missing"):
        settings = DAPOSettings(dynamic_sampling_draw=draw)
        step = NumberedStep(settings, by_group(wrong=lambda g: g == 2), engines=3)
        assert rewarded_samples(step).per_sample["group_ids"].unique().tolist() == [0, 1, 3, 4]
        assert step.draws == [4, 3] and step.values[metrics.SAMPLING_SURPLUS] == 2
        check_accounts(step)


def by_group(**kinds: Callable[[int], bool]) -> Callable[[int, int], Reward]:
    """Rewards of whole groups: right, wrong or failed where these functions say so, different otherwise."""

    def reward(group: int, sample: int) -> Reward:
        for name, value in (("right", 1.0), ("wrong", 0.0), ("failed", None)):
            if name in kinds and kinds[name](group):
                return value
        return float(sample % 2)

    return reward


def check_accounts(step: NumberedStep) -> None:
    """Every prompt that was drawn is counted as one thing."""
    values = step.values
    shards = (metrics.SAMPLING_USED, metrics.SAMPLING_FILTERED, metrics.SAMPLING_FAILED, metrics.SAMPLING_SURPLUS)
    assert values[metrics.SAMPLING_DRAWN] == sum(values[shard] for shard in shards) == sum(step.draws) == step.position
    assert values[metrics.SAMPLING_ROUNDS] == len(step.draws)


def test_a_step_by_hand() -> None:
    # Of groups 0 to 3 only 1 is good; 3 are missing and 12 expected to be needed, of which 4 are allowed: 4 to 7, all
    # good but 6. Full.
    step = NumberedStep(
        DAPOSettings(), by_group(right=lambda g: g in (0, 6), wrong=lambda g: g == 2, failed=lambda g: g == 3)
    )
    batch = rewarded_samples(step)
    assert batch.per_sample["group_ids"].unique().tolist() == [1, 4, 5, 7]
    assert ids(batch) == [100 * group + k for group in (1, 4, 5, 7) for k in range(4)]
    assert step.draws == [4, 4]
    assert step.calls == ["generate", "rewards"] * 2 + ["logprobs"]
    check_accounts(step)
    assert {name: value for name, value in step.values.items() if name.startswith("sampling/")} == {
        metrics.SAMPLING_ROUNDS: 2,
        metrics.SAMPLING_DRAWN: 8,
        metrics.SAMPLING_USED: 4,
        metrics.SAMPLING_FILTERED: 3,
        metrics.SAMPLING_FAILED: 1,
        metrics.SAMPLING_SURPLUS: 0,
        metrics.SAMPLING_ALL_RIGHT: 2 / 8,
        metrics.SAMPLING_ALL_WRONG: 1 / 8,
    }


def test_of_a_surplus_those_that_were_drawn_first_are_used() -> None:
    step = NumberedStep(DAPOSettings(), by_group(wrong=lambda g: g in (1, 2)))  # 2 good of 4: 4 more, all good
    batch = rewarded_samples(step)
    assert batch.per_sample["group_ids"].unique().tolist() == [0, 3, 4, 5]
    assert step.values[metrics.SAMPLING_SURPLUS] == 2
    check_accounts(step)


def test_groups_that_lost_samples_are_what_is_left_of_them() -> None:
    def reward(group: int, sample: int) -> Reward:
        if group == 0:  # what is left is equal
            return 1.0 if sample < 2 else None
        if group == 1:  # and here is one alone
            return 0.0 if sample == 3 else None
        return None if sample == 0 else float(sample)

    step = NumberedStep(DAPOSettings(), reward)
    batch = rewarded_samples(step)
    assert ids(batch) == [100 * group + k for group in (2, 3, 4, 5) for k in (1, 2, 3)]
    check_accounts(step)
    assert step.values[metrics.SAMPLING_FAILED] == 0


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["expected", "missing"])
def test_any_rewards_are_accounted_for(draw: str) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        share = chance.choice([0.05, 0.3, 0.7, 1.0])
        good = {group for group in range(400) if chance.random() < share}
        failed = {group for group in range(400) if chance.random() < 0.1}
        step = NumberedStep(
            DAPOSettings(dynamic_sampling_rounds=20, dynamic_sampling_draw=draw),
            by_group(failed=failed.__contains__, right=set(range(400)).difference(good).__contains__),
            prompts=5,
        )
        batch = rewarded_samples(step)
        check_accounts(step)
        used = batch.per_sample["group_ids"].unique().tolist()
        expected = [group for group in range(step.position) if group in good and group not in failed]
        assert used == expected[:5] and len(used) == step.values[metrics.SAMPLING_USED]
        if draw == "missing":
            assert step.values[metrics.SAMPLING_SURPLUS] == 0


def test_at_the_limit_a_step_learns_from_what_there_is_or_stops(capsys: pytest.CaptureFixture[str]) -> None:
    few = by_group(right=lambda g: g % 4 != 1)
    step = NumberedStep(DAPOSettings(dynamic_sampling_rounds=2), few)
    assert rewarded_samples(step).per_sample["group_ids"].unique().tolist() == [1, 5]
    check_accounts(step)
    stopping = DAPOSettings(dynamic_sampling_rounds=2, dynamic_sampling_at_limit="stop")
    for settings, reward, least in (
        (stopping, few, 2),
        (DAPOSettings(dynamic_sampling_rounds=2), few, 9),
        (DAPOSettings(dynamic_sampling_rounds=2), by_group(right=lambda g: True), 1),
    ):
        step = NumberedStep(settings, reward, least=least)
        with pytest.raises(EngineError, match=r"^step 1: [02] of 8 prompts in 2 rounds are used") as caught:
            rewarded_samples(step)
        [line] = str(caught.value).splitlines()
        assert (
            f"expected 4 of different rewards within algorithm.dynamic_sampling_rounds=2, or at least {least}" in line
        )
        check_accounts(step)


def test_without_dynamic_sampling_a_step_is_one_rollout_of_everything() -> None:
    step = NumberedStep(GRPOSettings(), by_group(right=lambda g: True))
    batch = rewarded_samples(step)
    assert len(batch) == 16 and step.calls == ["generate", "logprobs", "rewards"] and not step.values


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *[("grpo", 0.5**0.5), ("dapo", 0.5**0.5), ("dr_grpo", 0.5), ("rloo", 1.0), ("gpg", 0.5), ("opo", 0.5)],
        ("reinforce_plus_plus_baseline", 0.5),
    ],
)
def test_any_algorithm_of_groups_can_have_it_and_the_advantages_are_those_of_the_groups(name: str, size: float) -> None:
    algorithm = load(name)
    step = NumberedStep(algorithm.settings(dynamic_sampling=True), by_group(wrong=lambda g: g % 2 == 0), samples=2)
    batch = algorithm.make_experience(step).batch
    assert batch.per_sample["group_ids"].tolist() == [1, 1, 3, 3, 5, 5, 7, 7]
    assert batch.per_sample["advantages"].tolist() == pytest.approx([-size, size] * 4, rel=1e-5)
    assert step.calls[-1] == "logprobs"  # of those that are learned from alone
    check_accounts(step)
    # GPG's alpha is 1 where every group says something.
    assert step.values.get(metrics.REWARD_VALID_FRACTION, 1.0) == 1.0


def test_without_it_a_step_of_these_is_one_rollout_too() -> None:
    for name in ("rloo", "dr_grpo", "gpg", "opo", "reinforce_plus_plus_baseline", "pass_at_k", "reinforce_plus_plus"):
        algorithm = load(name)
        step = NumberedStep(algorithm.settings(), by_group(right=lambda g: g == 0))
        assert len(algorithm.make_experience(step).batch) == 16
        assert step.calls[:3] == ["generate", "logprobs", "rewards"], name
