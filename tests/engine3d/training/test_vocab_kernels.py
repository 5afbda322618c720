"""The kernels of log-probs and entropies against the same in PyTorch, under Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import run_interpreted

COLUMNS = 16
"""Of a block of a kernel: rows take several."""

# Rows, columns, columns that are no padding, temperature.
CASES = [(7, 50, 43, 0.7), (3, 16, 1, 1.0), (5, 40, 40, 1.3)]


def _compare(device: str) -> None:
    from engine3d.training import vocab_kernels, vocab_parallel

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
        moved = [each.to(device) for each in given]
        found = vocab_kernels.facts(moved[0], moved[1], real, temperature)
        expected = vocab_parallel._facts(logits, local, real, temperature)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
        assert not found.isnan().any()
        for last in (of_entropy, None):
            expected, result = torch.full_like(logits, 9.0), moved[0].clone()
            vocab_parallel._gradient(
                logits, local, real, temperature, normaliser + 10, entropy, of_logprob, of_all, last, expected
            )
            slopes = (*moved[4:6], None if last is None else moved[6])
            vocab_kernels.gradient(result, moved[1], real, temperature, moved[2], moved[3], *slopes, result)
            torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=1e-5)
            assert not result.isnan().any()


@pytest.mark.processes
def test_interpreted() -> None:
    run_interpreted(_compare)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    _compare("cuda")
