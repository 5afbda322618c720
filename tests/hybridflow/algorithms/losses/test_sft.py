"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from hybridflow.algorithms.losses.sft import sft_loss
from hybridflow.metrics import names as metrics


def test_sft_loss_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -3.0, float("nan")], requires_grad=True)
    loss, stats = sft_loss(logprobs, torch.tensor([0.5, 0.5, 0.0]))
    loss.backward()
    assert loss.item() == 2.0
    assert stats.values() == {metrics.SFT_LOSS: 2.0}
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]
