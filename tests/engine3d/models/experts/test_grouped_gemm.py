"""Grouped GEMMs equal those of one expert after another, forward and backward."""

from __future__ import annotations

import pytest
import torch

from engine3d.models.experts.grouped_gemm import are_adjacent, grouped_linear, stacked_view

COUNTS = [3, 0, 5, 1]
"""Tokens of each expert."""
IN, OUT = 16, 24


def _one_by_one(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    pairs = zip(tokens.split(COUNTS), weights, strict=True)
    return torch.cat([some @ weight.T for some, weight in pairs])


def _drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(COUNTS), IN), (len(COUNTS), OUT, IN), (sum(COUNTS), OUT)]
    tokens, weights, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return tokens, weights, gradient


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_products_and_gradients_are_those_of_each_expert(dtype: torch.dtype, limit: float) -> None:
    tokens, weights, gradient = _drawn(dtype)
    one, other = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    expected = _one_by_one(one, other)
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    assert one.grad is not None and other.grad is not None

    mine = tokens.clone().requires_grad_()
    parameter = torch.nn.Parameter(weights[0].clone())
    gradients = torch.ones(weights.shape)  # what earlier micro-batches left
    result = grouped_linear(mine, COUNTS, weights, gradients, parameter)
    result.backward(gradient)  # type: ignore[no-untyped-call]
    assert mine.grad is not None and result.dtype == dtype
    torch.testing.assert_close(result, expected.detach(), rtol=limit, atol=limit)
    torch.testing.assert_close(mine.grad, one.grad, rtol=limit, atol=limit)
    torch.testing.assert_close(gradients, 1 + other.grad.float(), rtol=limit, atol=limit)
    assert torch.equal(gradients[1], torch.ones(OUT, IN)), "an expert without tokens has no gradient"
    assert parameter.grad is None


def test_weights_get_gradients_where_tokens_need_none() -> None:
    tokens, weights, gradient = _drawn(torch.float32)
    gradients = torch.zeros_like(weights)
    result = grouped_linear(tokens, COUNTS, weights, gradients, torch.nn.Parameter(weights[0]))
    result.backward(gradient)  # type: ignore[no-untyped-call]
    assert gradients.abs().sum() > 0


def test_frozen_weights_pass_gradients_on() -> None:
    tokens, weights, gradient = _drawn(torch.float32)
    mine = tokens.clone().requires_grad_()
    frozen = torch.nn.Parameter(weights[0], requires_grad=False)
    grouped_linear(mine, COUNTS, weights, None, frozen).backward(gradient)  # type: ignore[no-untyped-call]
    expected = torch.cat([some @ weight for some, weight in zip(gradient.split(COUNTS), weights, strict=True)])
    torch.testing.assert_close(mine.grad, expected)


def test_a_rank_without_tokens() -> None:
    _, weights, _ = _drawn(torch.float32)
    gradients, nothing = torch.ones_like(weights), torch.empty(0, IN, requires_grad=True)
    result = grouped_linear(nothing, [0] * len(COUNTS), weights, gradients, torch.nn.Parameter(weights[0]))
    assert result.shape == (0, OUT)
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(gradients, torch.ones_like(weights))


def test_adjacent_tensors_are_viewed_as_one() -> None:
    memory = torch.arange(60.0)
    blocks = [memory[start : start + 12].view(3, 4) for start in (6, 18, 30)]
    assert are_adjacent(blocks)
    stacked = stacked_view(blocks[0], 3)
    assert torch.equal(stacked, torch.stack(blocks))
    stacked[1, 2, 3] = -1
    assert memory[29] == -1
    assert not are_adjacent(blocks[::-1])
    assert not are_adjacent([blocks[0], blocks[2]])
    assert not are_adjacent([block.T for block in blocks])
    assert not are_adjacent([blocks[0], torch.zeros(3, 4)])
