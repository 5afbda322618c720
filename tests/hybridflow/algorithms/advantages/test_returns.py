"""Discounted sums of the rewards from each token on."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.advantages.returns import discounted_returns
from tests.support.columns import mask_with_holes, soiled


def test_returns_by_hand() -> None:
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0], [3.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    # The second token of the first row is not the policy's: what follows the first is the third.
    returns = discounted_returns(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[1.0 + 0.5 * 2.0 + 0.25 * 4.0, 0.0, 2.0 + 0.5 * 4.0, 4.0], [3.0, 0.0, 0.0, 0.0]]
    assert returns.dtype == torch.float32


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_against_a_plain_sum_whatever_stands_outside_the_mask(gamma: float) -> None:
    torch.manual_seed(1)
    mask = mask_with_holes(6, 9)
    rewards = torch.randn(6, 9)
    returns = discounted_returns(soiled(rewards, mask), mask, gamma=gamma)
    for row in range(6):
        masked = [float(rewards[row, token]) for token in range(9) if mask[row, token]]
        expected = [sum(gamma**away * reward for away, reward in enumerate(masked[t:])) for t in range(len(masked))]
        assert returns[row][mask[row]].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert returns[~mask].count_nonzero() == 0
