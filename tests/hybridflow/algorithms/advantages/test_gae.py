"""Rewards of tokens and generalized advantage estimation, by hand and as the explicit double sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.advantages.gae import gae_advantages, length_adaptive_lambda, token_rewards
from tests.support.columns import mask_with_holes, soiled

T, F = True, False


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[T, F, T, F], [T, T, T, T], [F, F, F, F], [F, T, F, F]])
    rewards = torch.tensor([2.0, -1.0, 5.0, 3.0])
    expected = [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, -1.0], [0.0] * 4, [0.0, 3.0, 0.0, 0.0]]
    assert token_rewards(rewards, mask).tolist() == expected
    kl = torch.tensor([[1.0, 9.0, 2.0, 9.0], [0.0, -4.0, 8.0, 2.0], [9.0] * 4, [9.0, 0.5, 9.0, 9.0]])
    result = token_rewards(rewards, mask, kl, 0.5)
    assert result.tolist() == [[-0.5, 0.0, 1.0, 0.0], [0.0, 2.0, -4.0, -2.0], [0.0] * 4, [0.0, 2.75, 0.0, 0.0]]
    assert result.dtype == torch.float32
    # A cost is to be small: its penalty has the other sign.
    assert token_rewards(rewards, mask, kl, -0.5)[0].tolist() == [0.5, 0.0, 3.0, 0.0]


def test_token_rewards_never_read_outside_the_mask() -> None:
    torch.manual_seed(0)
    rewards, mask, kl = torch.randn(8), mask_with_holes(8, 7), torch.randn(8, 7)
    clean = token_rewards(rewards, mask, kl, 0.1)
    assert torch.equal(token_rewards(rewards, mask, soiled(kl, mask), 0.1), clean)
    assert clean[~mask].count_nonzero() == 0
    order = torch.randperm(8)
    assert torch.equal(token_rewards(rewards[order], mask[order], kl[order], 0.1), clean[order])
    assert token_rewards(rewards, mask[:, :0]).shape == (8, 0)
    with pytest.raises(ValueError, match="token_rewards: the reward of row 1 is nan, expected a finite number"):
        token_rewards(torch.tensor([0.0, float("nan")]), mask[:2])


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; counted: rewards 0, 0, 4 and values 1, 2, 3, with a hole after the first token.
    # delta_3 = 4 - 3 = 1; delta_2 = 0.5 * 3 - 2 = -0.5; delta_1 = 0.5 * 2 - 1 = 0.
    # A_3 = 1; A_2 = -0.5 + 0.25 * 1 = -0.25; A_1 = 0 + 0.25 * -0.25 = -0.0625.
    mask = torch.tensor([[T, F, T, T, F]])
    rewards, values = torch.tensor([[0.0, 7.0, 0.0, 4.0, 7.0]]), torch.tensor([[1.0, 7.0, 2.0, 3.0, 7.0]])
    advantages, returns = gae_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.0625, 0.0, -0.25, 1.0, 0.0]]
    assert returns.tolist() == [[0.9375, 0.0, 1.75, 4.0, 0.0]]
    assert advantages.dtype == returns.dtype == torch.float32


def double_sum(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t as the sum over l of (gamma lambda)^l delta_{t+l}, response by response over its loss tokens alone."""
    advantages, returns = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row in range(len(mask)):
        positions = mask[row].nonzero()[:, 0].tolist()
        reward = [rewards[row, position].item() for position in positions]
        value = [values[row, position].item() for position in positions] + [0.0]
        delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(len(positions))]
        for t, position in enumerate(positions):
            advantage = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(positions)))
            advantages[row, position], returns[row, position] = advantage, advantage + value[t]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_is_the_double_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    torch.manual_seed(1)
    rewards, values, mask = torch.randn(9, 13), torch.randn(9, 13), mask_with_holes(9, 13)
    advantages = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for column, expected in zip(advantages, double_sum(rewards, values, mask, gamma, lam), strict=True):
        torch.testing.assert_close(column, expected, rtol=1e-6, atol=1e-6)


def test_with_lambda_one_returns_are_the_rewards_to_come_whatever_the_critic_says() -> None:
    torch.manual_seed(2)
    mask = mask_with_holes(6, 10)
    rewards = torch.randn(6, 10) * mask
    _, returns = gae_advantages(rewards, 1e3 * torch.randn(6, 10), mask, gamma=1.0, lam=1.0)
    to_come = rewards.double().flip(1).cumsum(1).flip(1).float() * mask
    torch.testing.assert_close(returns, to_come, rtol=0, atol=2e-6)


def test_gae_never_reads_outside_the_mask_and_rows_stand_alone() -> None:
    torch.manual_seed(3)
    rewards, values, mask = torch.randn(8, 11), torch.randn(8, 11), mask_with_holes(8, 11)
    clean = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.9)
    dirty = gae_advantages(soiled(rewards, mask), soiled(values, mask), mask, gamma=0.9, lam=0.9)
    order = torch.randperm(8)
    shuffled = gae_advantages(rewards[order], values[order], mask[order], gamma=0.9, lam=0.9)
    for index, column in enumerate(clean):
        assert torch.equal(dirty[index], column)
        assert torch.equal(shuffled[index], column[order])
        assert column[~mask].count_nonzero() == 0
    # Tokens of the environment between those of the policy change nothing for the policy's.
    squeezed = torch.zeros_like(mask)
    close_rewards, close_values = torch.zeros_like(rewards), torch.zeros_like(values)
    for row, counted in enumerate(mask):
        number = int(counted.sum())
        squeezed[row, :number] = True
        close_rewards[row, :number], close_values[row, :number] = rewards[row, counted], values[row, counted]
    close = gae_advantages(close_rewards, close_values, squeezed, gamma=0.9, lam=0.9)
    for index, column in enumerate(clean):
        assert torch.equal(close[index][squeezed], column[mask])


def test_figures_that_are_no_numbers_and_other_shapes_are_refused() -> None:
    mask = torch.tensor([[T, T, F], [T, F, F]])
    good, bad = torch.zeros(2, 3), torch.zeros(2, 3)
    bad[1, 0] = torch.nan
    settings = {"gamma": 1.0, "lam": 1.0}
    with pytest.raises(ValueError, match="gae_advantages: the value of row 1, token 0 is nan, expected a finite"):
        gae_advantages(good, bad, mask, **settings)
    with pytest.raises(ValueError, match="token_rewards: the KL divergence of row 1, token 0 is nan"):
        token_rewards(torch.zeros(2), mask, bad, 0.1)
    with pytest.raises(ValueError, match=r"values has shape \(2, 1\) and response_mask \(2, 3\)"):
        gae_advantages(good, good[:, :1], mask, **settings)
    with pytest.raises(ValueError, match=r"token_rewards: rewards has shape \(2, 1\), expected \(2,\)"):
        token_rewards(torch.zeros(2, 1), mask)
    with pytest.raises(ValueError, match=r"the mask is torch\.int64, expected torch\.bool"):
        gae_advantages(good, good, mask.long(), **settings)


def test_a_lambda_for_each_response_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 9.0], [0.0, 0.0, 1.0]])
    values = torch.tensor([[0.1, 0.2, 0.4], [0.5, 0.25, 9.0], [0.1, 0.2, 0.4]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    lam = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=lam)
    expected = [[0.1, 0.2, 0.6], [0.5, 0.75, 0.0], [0.1 + 0.5 * (0.2 + 0.5 * 0.6), 0.2 + 0.5 * 0.6, 0.6]]
    torch.testing.assert_close(advantages, torch.tensor(expected))
    torch.testing.assert_close(returns, (torch.tensor(expected) + values) * mask)


def test_one_lambda_for_all_is_the_same_as_a_figure_to_the_last_bit() -> None:
    torch.manual_seed(1)
    rewards, values, mask = torch.randn(5, 7), torch.randn(5, 7), mask_with_holes(5, 7)
    one = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.95)
    many = gae_advantages(rewards, values, mask, gamma=0.9, lam=torch.full((5,), 0.95, dtype=torch.float64))
    assert all(map(torch.equal, one, many))
    with pytest.raises(ValueError, match="lam has shape"):
        gae_advantages(rewards, values, mask, gamma=1.0, lam=torch.ones(4))


def test_a_lambda_of_one_gives_monte_carlo_returns_whatever_the_critic_says() -> None:
    rewards, mask = torch.tensor([[0.5, -1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    _, returns = gae_advantages(rewards, torch.tensor([[7.0, -3.0, 11.0]]), mask, gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.5 - 0.5 + 0.5, -1.0 + 1.0, 2.0]]))


def test_lambda_by_length_by_hand() -> None:
    result = length_adaptive_lambda(torch.tensor([0, 1, 20, 21, 100, 4000]), 0.05)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx([0.0, 0.0, 0.0, 1 - 1 / 1.05, 0.8, 0.995])
    # What it is made for: the geometric series of lambda is alpha times the length.
    assert (1 / (1 - result[3:])).tolist() == pytest.approx([1.05, 5.0, 200.0])
