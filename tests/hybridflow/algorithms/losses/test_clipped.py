"""The clipped surrogate, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.losses.clipped import clipped_policy_loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.5, 2.0, None, -2.6, 0.0),  # clipped above at 1.3
        (1.5, -2.0, None, 3.0, 2.0),  # a bad token grown likelier is not clipped
        (0.5, -2.0, None, 1.6, 0.0),  # clipped below at 0.8
        (0.5, 2.0, None, -1.0, -2.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip: at most 3 * 2
        (2.0, -2.0, 3.0, 4.0, 2.0),
        (5.0, 2.0, 3.0, -2.6, 0.0),  # dual clip is for negative advantages only
        (0.5, 0.0, None, 0.0, 0.0),
    ],
)
def test_clipped_loss_by_hand(
    ratio: float, advantage: float, dual_clip: float | None, loss: float, slope: float
) -> None:
    old = torch.tensor([-3.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    result = clipped_policy_loss(
        logprobs, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3, dual_clip=dual_clip
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope * ratio, rel=1e-5)
    clipped = result.clipped_low | result.clipped_high | result.clipped_dual
    assert clipped.item() == (slope == 0.0 and advantage != 0.0)


def test_a_huge_ratio_leaves_gradients_finite() -> None:
    logprobs = torch.tensor([-1.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0])
    result = clipped_policy_loss(logprobs, old, torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
