"""Log-probs and entropies over a split vocabulary, against torch's own functions and their gradients."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine3d.training.passes import vocab_parallel
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


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


ENTROPIES = [(1.0, 1 << 20), (0.7, 64)]
"""Temperatures, and bytes of a chunk."""
CHOSEN = [(1.0, torch.float32), (0.7, torch.float32), (1.0, torch.bfloat16)]
MOST_LIKELY = [1, 4, VOCABULARY]


def _all_on_a_rank(world_size: int) -> tuple[list[Any], list[Any], list[Any]]:
    dist.init_process_group("gloo")
    results = (
        [_on_a_rank(world_size, *setting) for setting in ENTROPIES],
        [_choices_on_a_rank(world_size, *setting) for setting in CHOSEN],
        [_top_on_a_rank(world_size, count) for count in MOST_LIKELY],
    )
    dist.destroy_process_group()
    return results


@cache
def _of_ranks(world_size: int) -> list[tuple[list[Any], list[Any], list[Any]]]:
    """Results of all ranks, by the function that is tested and the setting."""
    return run_distributed(_all_on_a_rank, world_size, world_size, timeout_s=300)


def _on_a_rank(world_size: int, temperature: float, piece_bytes: int) -> tuple[torch.Tensor, ...]:
    usual, vocab_parallel._CHUNK_BYTES = vocab_parallel._CHUNK_BYTES, piece_bytes
    logits, targets, slopes = _inputs()
    width = PADDED // world_size
    rank = int(os.environ["RANK"])
    mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    logprobs, entropy = vocab_parallel.logprobs_and_entropy(
        mine, targets, vocabulary=VOCABULARY, group=_world(), temperature=temperature
    )
    (logprobs * slopes[:, 0] + entropy * slopes[:, 1]).sum().backward()
    vocab_parallel._CHUNK_BYTES = usual
    assert mine.grad is not None
    return logprobs.detach(), entropy.detach(), mine.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "piece_bytes"), ENTROPIES)
def test_equals_log_softmax_and_its_gradient(world_size: int, temperature: float, piece_bytes: int) -> None:
    logits, targets, slopes = _inputs()
    # The columns past the vocabulary are padding: they take no probability and get no gradient.
    reference = logits[:, :VOCABULARY].double().clone().requires_grad_()
    every = torch.log_softmax(reference / temperature, dim=-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    entropy = -(every.exp() * every.where(every > -torch.inf, 0.0)).sum(dim=-1)
    (logprobs * slopes[:, 0] + entropy * slopes[:, 1]).sum().backward()
    assert reference.grad is not None and not reference.grad.isnan().any()

    setting = ENTROPIES.index((temperature, piece_bytes))
    results = [of_rank[setting] for of_rank, _, _ in _of_ranks(world_size)]
    for rank_logprobs, rank_entropy, _ in results:
        torch.testing.assert_close(rank_logprobs, logprobs.detach().float(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(rank_entropy, entropy.detach().float(), atol=2e-6, rtol=1e-5)
    gradient = torch.cat([result[2] for result in results], dim=1)
    torch.testing.assert_close(gradient[:, :VOCABULARY], reference.grad.float(), atol=2e-6, rtol=1e-5)
    assert not gradient[:, VOCABULARY:].any()


CHOICES = 3


def _choices() -> torch.Tensor:
    """Different tokens in each row, of all slices: with the target, without it, and one that cannot be drawn."""
    logits, targets, _ = _inputs()
    rows = torch.randn(logits.shape[0], VOCABULARY, generator=torch.Generator().manual_seed(4)).argsort(dim=1)
    rows[0] = rows[0].roll(1 - int((rows[0] == targets[0]).nonzero()))  # the target is chosen
    rows[2] = torch.arange(VOCABULARY - 1, -1, -1)  # -inf
    return rows[:, :CHOICES]


def _choices_on_a_rank(world_size: int, temperature: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    logits, targets, slopes = _inputs()
    width = PADDED // world_size
    rank = int(os.environ["RANK"])
    results = []
    for overwrite in (False, True):
        mine = logits[:, rank * width : (rank + 1) * width].to(dtype).requires_grad_()
        logprobs, entropy, chosen = vocab_parallel.logprobs_of_choices(
            mine * 1 if overwrite else mine,
            targets,
            _choices(),
            vocabulary=VOCABULARY,
            group=_world(),
            temperature=temperature,
            overwrite=overwrite,
        )
        used = chosen.where(chosen > -torch.inf, 0.0) * torch.arange(1.0, CHOICES + 1)
        (logprobs * slopes[:, 0] + entropy * slopes[:, 1] + used.sum(dim=1)).sum().backward()
        assert mine.grad is not None
        results += [logprobs.detach(), entropy.detach(), chosen.detach(), mine.grad]
    return tuple(results)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "dtype"), CHOSEN)
def test_log_probs_of_chosen_tokens_and_their_gradient(world_size: int, temperature: float, dtype: torch.dtype) -> None:
    logits, targets, slopes = _inputs()
    reference = logits[:, :VOCABULARY].to(dtype).double().requires_grad_()
    every = torch.log_softmax(reference / temperature, dim=-1)
    logprobs, chosen = every.gather(1, targets[:, None])[:, 0], every.gather(1, _choices())
    assert (chosen == -torch.inf).any() and (_choices() == targets[:, None]).any()
    entropy = -(every.exp() * every.where(every > -torch.inf, 0.0)).sum(dim=-1)
    used = chosen.where(chosen > -torch.inf, 0.0) * torch.arange(1.0, CHOICES + 1)
    (logprobs * slopes[:, 0] + entropy * slopes[:, 1] + used.sum(dim=1)).sum().backward()
    assert reference.grad is not None and not reference.grad.isnan().any()

    results = [of_rank[CHOSEN.index((temperature, dtype))] for _, of_rank, _ in _of_ranks(world_size)]
    for result in results:
        for first in (0, 4):
            torch.testing.assert_close(result[first], logprobs.detach().float(), atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(result[first + 1], entropy.detach().float(), atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(result[first + 2], chosen.detach().float(), atol=2e-6, rtol=1e-5)
    # Each element is rounded once, also where its parts cancel.
    relative = 1e-5 if dtype == torch.float32 else 2**-8
    for last in (3, 7):
        gradient = torch.cat([result[last].float() for result in results], dim=1)
        torch.testing.assert_close(gradient[:, :VOCABULARY], reference.grad.float(), atol=2e-6, rtol=relative)
        assert not gradient[:, VOCABULARY:].any()


def _top_on_a_rank(world_size: int, count: int) -> torch.Tensor:
    logits, _, _ = _inputs()
    logits[:, VOCABULARY:] = 100.0  # padding is no token, whatever is there
    logits[4] = 1.0  # all alike
    width = PADDED // world_size
    rank = int(os.environ["RANK"])
    return vocab_parallel.top_tokens(
        logits[:, rank * width : (rank + 1) * width], count, vocabulary=VOCABULARY, group=_world()
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("count", MOST_LIKELY)
def test_the_most_likely_tokens_are_those_of_the_whole_vocabulary(world_size: int, count: int) -> None:
    logits, _, _ = _inputs()
    logits = logits[:, :VOCABULARY]
    logits[4] = 1.0
    expected = logits.sort(dim=1, descending=True).values[:, :count]
    for top in (of_rank[MOST_LIKELY.index(count)] for _, _, of_rank in _of_ranks(world_size)):
        assert top.dtype == torch.int64 and top.shape == (TOKENS, count)
        assert all(len(set(row)) == count for row in top.tolist())
        torch.testing.assert_close(logits.gather(1, top), expected, atol=0, rtol=0)


def test_more_of_the_most_likely_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 11, expected 1 to 10, the tokens of the vocabulary"):
        vocab_parallel.top_tokens(torch.zeros(2, PADDED), VOCABULARY + 1, vocabulary=VOCABULARY, group=None)  # type: ignore[arg-type]
