"""The kernels of log-probs and entropies against the same in PyTorch, under Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.interpreted import run_interpreted

COLUMNS = 16
"""Columns of a block of a kernel: rows take several."""

# Rows, columns, columns that are no padding, temperature.
CASES = [(7, 50, 43, 0.7), (3, 16, 1, 1.0), (5, 40, 40, 1.3)]


def _compare(device: str) -> None:
    from engine3d.training.passes import vocab_kernels, vocab_parallel

    vocab_kernels._COLUMNS = COLUMNS
    generator = torch.Generator().manual_seed(5)
    for rows, width, real, temperature in CASES:
        logits = 4 * torch.randn(rows, width, generator=generator)
        logits[:, real:] = 100.0
        logits[1, ::2] = -torch.inf  # tokens that cannot be drawn
        if real > COLUMNS:
            logits[2, :COLUMNS] = -torch.inf  # a whole block of them
        # Some targets are other ranks'.
        local = torch.randint(-5, real + 3, (rows,), generator=generator)
        local[0] = real - 1
        normaliser, entropy, of_logprob, of_all, of_entropy = torch.randn(5, rows, generator=generator)
        given = (logits, local, normaliser + 10, entropy, of_logprob, of_all, of_entropy)
        moved = [tensor.to(device) for tensor in given]
        result = vocab_kernels.softmax_stats(moved[0], moved[1], real, temperature)
        expected = vocab_parallel._softmax_stats(logits, local, real, temperature)
        torch.testing.assert_close(result.cpu(), expected, atol=1e-5, rtol=1e-5)
        assert not result.isnan().any()
        for last in (of_entropy, None):
            expected, result = torch.full_like(logits, 9.0), moved[0].clone()
            vocab_parallel._gradient(
                logits, local, real, temperature, normaliser + 10, entropy, of_logprob, of_all, last, expected
            )
            of_last = None if last is None else moved[6]
            vocab_kernels.gradient(
                result, moved[1], real, temperature, moved[2], moved[3], moved[4], moved[5], of_last, result
            )
            torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=1e-5)
            assert not result.isnan().any()


def _of_no_number(device: str) -> None:
    """Compare with PyTorch's softmax where a logit is nan, infinite, or of no possible token."""
    from engine3d.training.passes import vocab_kernels, vocab_parallel

    vocab_kernels._COLUMNS = COLUMNS
    logits = torch.randn(9, 3 * COLUMNS + 5, generator=torch.Generator().manual_seed(6))
    for row, (first, value) in enumerate(
        [(0, torch.nan), (COLUMNS + 3, torch.nan), (-1, torch.nan), (4, torch.inf), (-1, torch.inf)]
    ):
        logits[row, first] = value
    logits[5, 2], logits[5, 3 * COLUMNS] = torch.nan, torch.inf
    logits[6] = -torch.inf
    logits[7] = -torch.inf
    logits[7, COLUMNS] = torch.nan
    local = torch.tensor([0, 1, 2, 4, 7, 3, 5, 6, 8])  # of some rows the very token
    result = vocab_kernels.softmax_stats(logits.to(device), local.to(device), logits.shape[1], 0.8).cpu()
    plain = vocab_parallel._softmax_stats(logits, local, logits.shape[1], 0.8)
    every = (logits / 0.8).log_softmax(dim=1)
    logprobs = every.gather(1, local[:, None]).squeeze(1)
    entropy = -(every.exp() * every).sum(dim=1)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [True] * 8 + [False]
    for _, total, weighted, chosen in (result, plain):
        torch.testing.assert_close(chosen - total.log(), logprobs, equal_nan=True)
        torch.testing.assert_close(total.log() - weighted / total, entropy, equal_nan=True)
    slopes = torch.ones(3, len(logits))
    of_chosen, of_all, of_entropy = slopes
    expected = torch.empty_like(logits)
    normaliser = (logits / 0.8).logsumexp(dim=1).where(~entropy.isnan(), torch.nan)
    vocab_parallel._gradient(
        logits, local, logits.shape[1], 0.8, normaliser, entropy, of_chosen, of_all, of_entropy, expected
    )
    given = [tensor.to(device) for tensor in (logits, local, normaliser, entropy, of_chosen, of_all, of_entropy)]
    result = torch.empty_like(given[0])
    vocab_kernels.gradient(
        given[0], given[1], logits.shape[1], 0.8, given[2], given[3], given[4], given[5], given[6], result
    )
    assert expected[:8].isnan().all() and not expected[8].isnan().any()
    torch.testing.assert_close(result.cpu(), expected, equal_nan=True)


@pytest.mark.processes
@pytest.mark.parametrize("compare", [_compare, _of_no_number])
def test_interpreted(compare: Callable[[str], None]) -> None:
    run_interpreted(compare)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    _compare("cuda")
    _of_no_number("cuda")
