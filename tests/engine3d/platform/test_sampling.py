"""Tokens drawn from logits by inversion: PyTorch's operators against numpy, and the kernel against these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine3d.platform import platform
from engine3d.platform.cpu.cpu_platform import draw_tokens
from tests.support.interpreted import run_interpreted

LARGEST = float(np.nextafter(1.0, 0.0))
SIZES = [(1, 1), (5, 7), (3, 4096), (4, 4097), (3, 9000)]


def made(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Logits, a third of which have no probability, temperatures, and random numbers, the first and last extreme."""
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    logits[:, 1::3] = float("-inf")
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniforms[0], uniforms[-1] = 0.0, LARGEST
    return logits.to(dtype), 0.5 + torch.rand(rows, generator=generator), uniforms


@pytest.mark.parametrize(("rows", "vocabulary"), SIZES)
def test_tokens_are_those_whose_cumulative_probability_is_passed_first(rows: int, vocabulary: int) -> None:
    logits, temperatures, uniforms = made(rows, vocabulary)
    before = logits.clone()
    tokens, logprobs = draw_tokens(logits, temperatures, uniforms)
    assert torch.equal(logits, before)
    assert (tokens.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    for row in range(rows):
        scaled = logits[row].double().numpy() / float(temperatures[row])
        weights = np.exp(scaled - scaled.max())
        passed = np.nonzero(np.cumsum(weights) > float(uniforms[row]) * weights.sum())[0]
        assert int(tokens[row]) == (passed[0] if len(passed) else np.nonzero(weights)[0][-1])
        assert float(logprobs[row]) == pytest.approx(np.log(weights[tokens[row]] / weights.sum()), abs=1e-5)


def test_each_token_is_drawn_as_often_as_it_is_likely() -> None:
    draws = 20_000
    logits = torch.tensor([[0.0, 1.0, float("-inf"), -2.0, 3.0, 0.5]])
    uniforms = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, _ = draw_tokens(logits.expand(draws, 6), torch.full((draws,), 2.0), uniforms)
    expected = draws * (logits[0] / 2).softmax(dim=-1)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[2] == 0
    drawn = expected > 0
    assert ((counts - expected)[drawn] ** 2 / expected[drawn]).sum() < 18.5  # chi-square of 4 degrees, p = 0.001


def like_pytorch(device: str) -> None:
    """The kernel draws the same, but where a random number is on the edge of two tokens."""
    from engine3d.platform.cuda import sampling as cuda_sampling

    for rows, vocabulary in [*SIZES, *([(300, 151936)] if device == "cuda" else [])]:
        for dtype in (torch.float32, torch.bfloat16):
            logits, temperatures, uniforms = made(rows, vocabulary, dtype)
            wide = torch.full((rows, vocabulary + 3), float("nan"), dtype=dtype)  # rows that are parts of longer ones
            wide[:, :vocabulary] = logits
            tokens, logprobs = (
                drawn.cpu()
                for drawn in cuda_sampling.draw_tokens(
                    wide.to(device)[:, :vocabulary], temperatures.to(device), uniforms.to(device)
                )
            )
            assert (tokens.dtype, logprobs.dtype) == (torch.int32, torch.float32)
            every = (logits.double() / temperatures.double()[:, None]).log_softmax(dim=-1)
            cumulative = every.exp().cumsum(dim=-1)
            index = tokens.long()[:, None]
            assert torch.isfinite(every.gather(1, index)).all()
            torch.testing.assert_close(logprobs.double(), every.gather(1, index)[:, 0], atol=2e-5, rtol=1e-5)
            above = cumulative.gather(1, index)[:, 0]
            below = above - every.gather(1, index)[:, 0].exp()
            assert (below - 1e-6 <= uniforms).all() and (uniforms <= above + 1e-6).all()
            expected, _ = draw_tokens(logits, temperatures, uniforms)
            assert (tokens != expected).sum() <= rows // 20
            # Alone, a row is drawn as in company. Where it lies in memory decides in which order a GPU adds up.
            for row in (0, rows - 1):
                tokens_logprobs = cuda_sampling.draw_tokens(
                    wide[row : row + 1].clone().to(device)[:, :vocabulary],
                    temperatures[row : row + 1].to(device),
                    uniforms[row : row + 1].to(device),
                )
                assert (int(tokens_logprobs[0]), float(tokens_logprobs[1])) == (int(tokens[row]), float(logprobs[row]))
    none = cuda_sampling.draw_tokens(*(tensor.to(device) for tensor in (logits[:0], temperatures[:0], uniforms[:0])))
    assert [len(tensor) for tensor in none] == [0, 0]


def rows_of_no_number() -> tuple[torch.Tensor, ...]:
    """Logits of which some are no number, infinite, or of no possible token; only the last row has a distribution."""
    logits, temperatures, uniforms = made(7, 9000)
    logits[0, 17] = logits[1, 8999] = logits[2, 4096] = float("nan")
    logits[3, 5000] = float("inf")
    logits[4, 3], logits[4, 8000] = float("inf"), float("nan")
    logits[5] = float("-inf")
    return logits, temperatures, uniforms


def without_distribution(device: str) -> None:
    """Compare rows without a distribution: the log-prob is nan as PyTorch's softmax is."""
    from engine3d.platform.cuda import sampling as cuda_sampling

    given = rows_of_no_number()
    tokens, logprobs = cuda_sampling.draw_tokens(*(tensor.to(device) for tensor in given))
    expected_tokens, expected = draw_tokens(*given)
    assert expected.isnan().tolist() == [True] * 6 + [False]
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logprobs.cpu(), expected, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.processes
@pytest.mark.parametrize("compare", [like_pytorch, without_distribution])
def test_the_kernel_interpreted(compare: Callable[[str], None]) -> None:
    run_interpreted(compare)


@pytest.mark.slow
@pytest.mark.skipif(platform.gpus > 0, reason="the test below runs the kernel on the GPU")
def test_the_kernel_compiles_for_a_gpu() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from engine3d.platform.cuda import sampling as cuda_sampling

    pointers = {
        "temperatures": "*fp32",
        "uniforms": "*fp64",
        "block_sums": "*fp32",
        "tokens": "*i32",
        "logprobs": "*fp32",
    }
    for dtype in ("*fp32", "*bf16"):
        source = ASTSource(
            fn=cuda_sampling.draw_rows,
            signature={"logits": dtype, "stride": "i32"}
            | pointers
            | {"vocabulary": "i32", "BLOCK": "constexpr", "BLOCKS": "constexpr"},
            constexprs={(8,): cuda_sampling._BLOCK, (9,): 64},
            attrs={},
        )
        options = {"num_warps": cuda_sampling._WARPS}
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        # What some threads of a program write is there for the others.
        assert ptx.index("st.global") < ptx.index("bar.sync", ptx.index("st.global"))
        assert ".local" not in ptx  # no register is spilled


@pytest.mark.gpu
@pytest.mark.skipif(not platform.gpus, reason="needs a GPU")
def test_the_kernel_on_a_gpu() -> None:
    like_pytorch("cuda")
