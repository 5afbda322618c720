"""Safe-RLHF: advantages of the Lagrangian, and the multiplier against gradient ascent by autograd."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
import torch

from hybridflow.algorithms import safe_rlhf
from hybridflow.algorithms.advantages.gae import gae_advantages, token_rewards
from hybridflow.algorithms.advantages.safe_rlhf import safe_advantages
from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.safe_rlhf import SafeRLHFSettings
from hybridflow.batch.remote_batch import RemoteBatch
from tests.support.columns import mask_with_holes
from tests.support.steps import NumberedStep


def test_safe_advantages_by_hand() -> None:
    reward, cost = torch.tensor([[3.0, -1.0, 0.0]]), torch.tensor([[1.0, 2.0, 0.0]])
    result = safe_advantages(reward, cost, 1.0)
    assert result.tolist() == [[1.0, -1.5, 0.0]]
    assert result.dtype == torch.float32
    assert safe_advantages(reward, cost, 3.0).tolist() == [[0.0, -1.75, 0.0]]
    assert torch.equal(safe_advantages(reward, cost, 0.0), reward)
    torch.testing.assert_close(safe_advantages(reward, cost, 1e9), -cost)


def test_a_kl_penalty_on_both_sides_has_the_same_weight_whatever_the_multiplier_is() -> None:
    torch.manual_seed(0)
    mask, kl = mask_with_holes(5, 7), torch.rand(5, 7)
    nothing, values = torch.zeros(5), torch.zeros(5, 7)
    reward, _ = gae_advantages(token_rewards(nothing, mask, kl, 0.3), values, mask, gamma=1.0, lam=0.9)
    cost, _ = gae_advantages(token_rewards(nothing, mask, kl, -0.3), values, mask, gamma=1.0, lam=0.9)
    assert reward.count_nonzero() > 0
    for multiplier in (0.0, 0.5, 4.0):
        torch.testing.assert_close(safe_advantages(reward, cost, multiplier), reward)


def test_the_multiplier_ascends_the_lagrangian() -> None:
    multiplier = LagrangeMultiplier(initial=0.5, lr=0.2, limit=1.0, minimum=1e-6, maximum=1e6)
    log = torch.tensor(math.log(0.5), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([log], lr=0.2, maximize=True)
    for mean_cost in (3.0, 2.0, 1.0, -4.0, 0.5):
        optimizer.zero_grad()
        (log.exp() * (mean_cost - 1.0)).backward()
        optimizer.step()
        multiplier.update(mean_cost)
        assert multiplier.value == pytest.approx(log.exp().item(), rel=1e-12)


def test_the_multiplier_by_hand() -> None:
    multiplier = LagrangeMultiplier(initial=2.0, lr=0.1, limit=0.5, minimum=1e-3, maximum=4.0)
    assert multiplier.value == pytest.approx(2.0)
    multiplier.update(0.5)  # at the limit it stays
    assert multiplier.value == pytest.approx(2.0)
    multiplier.update(1.5)
    assert multiplier.value == pytest.approx(2.0 * math.exp(0.1 * 2.0 * 1.0))
    multiplier.update(100.0)
    assert multiplier.value == pytest.approx(4.0)
    multiplier.update(-0.5)  # and comes down from the maximum at once
    assert multiplier.value == pytest.approx(4.0 * math.exp(-0.1 * 4.0))
    for _ in range(2000):
        multiplier.update(-10.0)
    assert multiplier.value == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="the mean cost is nan, expected a finite number"):
        multiplier.update(math.nan)


def test_the_multiplier_goes_on_exactly_where_it_was() -> None:
    first = LagrangeMultiplier(initial=0.7, lr=0.1, limit=0.0, minimum=0.01, maximum=5.0)
    first.update(0.123)
    state = json.loads(json.dumps(first.state_dict()))
    second = LagrangeMultiplier(initial=2.0, lr=0.1, limit=0.0, minimum=0.01, maximum=5.0)
    second.load_state_dict(state)
    for multiplier in (first, second):
        multiplier.update(0.456)
    assert second.value == first.value
    lower = LagrangeMultiplier(initial=0.1, lr=0.1, limit=0.0, minimum=0.1, maximum=0.2)
    lower.load_state_dict(state)
    assert lower.value == pytest.approx(0.2)
    higher = LagrangeMultiplier(initial=2.0, lr=0.1, limit=0.0, minimum=1.5, maximum=5.0)
    higher.load_state_dict(state)
    assert higher.value == pytest.approx(1.5)


def test_the_multiplier_comes_back_from_a_batch_of_very_low_cost() -> None:
    config = SafeRLHFSettings()
    multiplier = Controllers(config).multiplier
    assert multiplier is not None
    multiplier.update(-400.0)
    assert multiplier.value == pytest.approx(config.lagrange_min)
    steps = round((1 / config.lagrange_min - 1) / config.lagrange_lr)  # of the continuous equation
    for _ in range(steps):
        multiplier.update(1.0)
    assert multiplier.value == pytest.approx(1.0, rel=0.2)


@dataclass
class _CostlyStep(NumberedStep):
    """A step whose samples cost 1 each."""

    weight: LagrangeMultiplier | None = None

    @property
    def multiplier(self) -> LagrangeMultiplier:
        assert self.weight is not None
        return self.weight

    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        return batch.with_per_sample(costs=torch.ones(len(batch)))


def test_the_multiplier_stays_while_the_critics_alone_learn() -> None:
    config = SafeRLHFSettings(critic_warmup_steps=2)
    multiplier, values = Controllers(config).multiplier, []
    assert multiplier is not None
    for number in range(1, 5):
        step = _CostlyStep(config, lambda group, sample: 0.5, number=number, weight=multiplier)
        safe_rlhf.learn(step, safe_rlhf.make_experience(step))
        values.append(multiplier.value)
    assert values[:2] == [config.lagrange_initial] * 2 and values[3] > values[2] > values[1]


def test_advantages_of_two_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"safe_advantages: cost_advantages has shape \(3, 1\) and reward_advantages \(3, 4\)"
    ):
        safe_advantages(torch.zeros(3, 4), torch.zeros(3, 1), 1.0)
