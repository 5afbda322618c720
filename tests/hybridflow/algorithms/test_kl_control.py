"""The KL penalty's coefficient, what the penalty is in rewards, and the guard."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.kl_control import AdaptiveKL, FixedKL, KLController, KLGuard, make_kl_controller, reward_kl
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.batch.sample_batch import SampleBatch


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKL(0.1)
    controller.update(50.0, 1000)
    assert controller.coef == 0.1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.25),  # a tenth above the target
        (5.4, 1 - 0.1 * 0.25),
        (100.0, 1 + 0.2 * 0.25),  # the error is clipped
        (0.0, 1 - 0.2 * 0.25),
        (-3.0, 1 - 0.2 * 0.25),  # an estimate may be negative
        (math.inf, 1 + 0.2 * 0.25),
    ],
)
def test_the_adaptive_coefficient_by_hand(kl: float, factor: float) -> None:
    controller = AdaptiveKL(0.4, target=6.0, horizon=1000)
    controller.update(kl, samples=250)
    assert controller.coef == pytest.approx(0.4 * factor, rel=1e-12)


def test_the_adaptive_coefficient_grows_e_fold_in_a_horizon_of_samples() -> None:
    # Far above the target the error is 0.2, so five horizons of samples are one e-fold, in batches small enough.
    controller = AdaptiveKL(1.0, target=1.0, horizon=1000)
    for _ in range(5000):
        controller.update(10.0, samples=1)
    assert controller.coef == pytest.approx(math.e, rel=1e-3)


def test_the_adaptive_coefficient_finds_the_target() -> None:
    controller = AdaptiveKL(0.01, target=0.5, horizon=500)
    for _ in range(2000):
        controller.update(0.1 / controller.coef, samples=100)
    assert controller.coef == pytest.approx(0.2, rel=1e-6)


def test_the_adaptive_coefficient_refuses_what_would_ruin_it() -> None:
    controller = AdaptiveKL(0.4, target=6.0, horizon=100)
    with pytest.raises(ValueError, match="KL divergence is nan, expected a number"):
        controller.update(math.nan, 10)
    with pytest.raises(ValueError, match="500 samples at once with kl_horizon 100, expected a horizon above 100"):
        controller.update(6.0, 500)
    controller.update(0.0, 499)
    assert controller.coef > 0


def test_controllers_go_on_where_they_were() -> None:
    first = AdaptiveKL(0.4, target=6.0, horizon=1000)
    first.update(7.0, 100)
    state = json.loads(json.dumps(first.state_dict()))
    controllers: list[KLController] = [AdaptiveKL(0.9, target=6.0, horizon=1000), FixedKL(0.9)]
    for controller in controllers:
        controller.load_state_dict(state)
    assert [controller.coef for controller in controllers] == [first.coef, 0.9]
    first.load_state_dict(FixedKL(0.3).state_dict())
    assert first.coef == 0.3


def test_settings_make_the_controller() -> None:
    fixed = make_kl_controller(GRPOSettings(kl_coef=0.1))
    assert isinstance(fixed, FixedKL)
    assert fixed.coef == 0.1
    settings = PPOSettings(kl_coef=0.1, kl_controller="adaptive", kl_target=2.0, kl_horizon=100)
    adaptive = make_kl_controller(settings)
    adaptive.update(2.2, 10)
    assert adaptive.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))


def test_the_guard_trips_past_its_limit() -> None:
    guard = KLGuard(0.1)
    assert [guard.trips(kl) for kl in (-1.0, 0.1, 0.1001, math.inf, math.nan)] == [False, False, True, True, True]
    assert not any(KLGuard(None).trips(kl) for kl in (1e9, math.inf, math.nan))


def test_the_kl_in_the_rewards() -> None:
    batch = SampleBatch.from_generations(
        prompts=[[1]],
        responses=[[5, 6]],
        logprobs=[[-1.0, -2.0]],
        sample_ids=[0],
        group_ids=[0],
        prompt_indices=[0],
        policy_versions=[0],
        finish_reasons=["stop"],
    )
    ppo = PPOSettings(kl_coef=0.1)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        reward_kl(batch, ppo)
    batch = batch.replace(ref_logprobs=torch.tensor([-1.5, -1.0]))
    kl = reward_kl(batch, ppo)
    assert kl is not None
    assert kl.tolist() == [0.5, -1.0]
    kl = reward_kl(batch.replace(old_logprobs=torch.tensor([-1.25, -2.0])), ppo)
    assert kl is not None
    assert kl.tolist() == [0.25, -1.0]
    assert reward_kl(batch, PPOSettings()) is None
    assert reward_kl(batch, PPOSettings(kl_coef=0.1, kl_in="loss")) is None
