"""Log-probs and entropies over a split vocabulary, against torch's own functions and their gradients."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from engine3d.training import vocab_parallel
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.processes

TOKENS, VOCABULARY, PADDED = 7, 10, 12


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(TOKENS, PADDED, generator=generator)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    # Tokens that cannot be drawn: some of a slice; and, of the second of two or four ranks, all.
    logits[1, ::2] = logits[2, PADDED // 2 :] = logits[3, PADDED // 4 : PADDED // 2] = -torch.inf
    targets[1:4] = torch.tensor([1, 0, 7])
    return logits, targets, torch.rand(TOKENS, 2, generator=generator)


def _on_a_rank(world_size: int, temperature: float, piece_bytes: int) -> tuple[torch.Tensor, ...]:
    dist.init_process_group("gloo")
    vocab_parallel._PIECE_BYTES = piece_bytes
    logits, targets, slopes = _inputs()
    width = PADDED // world_size
    rank = int(os.environ["RANK"])
    mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    logprobs, entropy = vocab_parallel.logprobs_and_entropy(
        mine, targets, vocabulary=VOCABULARY, group=dist.group.WORLD, temperature=temperature
    )
    (logprobs * slopes[:, 0] + entropy * slopes[:, 1]).sum().backward()
    dist.destroy_process_group()
    assert mine.grad is not None
    return logprobs.detach(), entropy.detach(), mine.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "piece_bytes"), [(1.0, 1 << 20), (0.7, 64)])
def test_equals_log_softmax_and_its_gradient(world_size: int, temperature: float, piece_bytes: int) -> None:
    logits, targets, slopes = _inputs()
    # The columns past the vocabulary are padding: they take no probability and get no gradient.
    reference = logits[:, :VOCABULARY].double().clone().requires_grad_()
    every = torch.log_softmax(reference / temperature, dim=-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    entropy = -(every.exp() * every.where(every > -torch.inf, 0.0)).sum(dim=-1)
    (logprobs * slopes[:, 0] + entropy * slopes[:, 1]).sum().backward()
    assert reference.grad is not None and not reference.grad.isnan().any()

    results = run_distributed(_on_a_rank, world_size, world_size, temperature, piece_bytes, timeout_s=120)
    for rank_logprobs, rank_entropy, _ in results:
        torch.testing.assert_close(rank_logprobs, logprobs.detach().float(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(rank_entropy, entropy.detach().float(), atol=2e-6, rtol=1e-5)
    gradient = torch.cat([result[2] for result in results], dim=1)
    torch.testing.assert_close(gradient[:, :VOCABULARY], reference.grad.float(), atol=2e-6, rtol=1e-5)
    assert not gradient[:, VOCABULARY:].any()
