"""The gated delta rule and its convolution over packed sequences are those of each sequence alone, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine3d.platform.delta_rule import CHUNK, causal_convolution, gated_delta_rule

BOUNDS = [0, 5, 5, 5 + 3 * CHUNK, 7 + 4 * CHUNK, 7 + 5 * CHUNK]
"""A short sequence, an empty one, whole chunks, and a chunk and a bit."""
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 12


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = BOUNDS[-1]
    shapes = [(tokens, KEY_HEADS, KEY_DIM)] * 2 + [(tokens, HEADS, VALUE_DIM), (tokens, HEADS), (tokens, HEADS)]
    query, key, value, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    return [tensor.requires_grad_() for tensor in (query, key, value, -decay.detach().abs(), beta.detach().sigmoid())]


def rule_of(tensors: Sequence[Tensor], bounds: list[int], states: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rule of packed sequences."""
    query, key, value, decay, beta = tensors
    return gated_delta_rule(query, key, value, decay, beta, bounds, states)


def one_by_one(tensors: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as its formula has it, of one sequence."""
    query, key, value, decay, beta = (tensor.double() for tensor in tensors)
    query, key = (
        (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(HEADS // KEY_HEADS, 1)
        for rows in (query, key)
    )
    state, outputs = state.double(), []
    for token in range(len(query)):
        state = state * decay[token].exp()[:, None, None]
        new = beta[token, :, None] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
        state = state + key[token, :, :, None] * new[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]) / KEY_DIM**0.5)
    return torch.stack(outputs) if outputs else value, state


@pytest.mark.slow
def test_packed_sequences_are_the_recurrence_of_each() -> None:
    tensors = inputs()
    states = torch.randn(len(BOUNDS) - 1, HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(4))
    for given in (None, states):
        output, last = rule_of(tensors, BOUNDS, given)
        starts = torch.zeros_like(states) if given is None else given
        alone = [
            one_by_one([tensor[first:end] for tensor in tensors], start)
            for (first, end), start in zip(pairwise(BOUNDS), starts, strict=True)
        ]
        expected = torch.cat([outputs for outputs, _ in alone])
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(last.double(), torch.stack([state for _, state in alone]), atol=2e-5, rtol=0)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
        gradients = torch.autograd.grad((output * weights).sum(), tensors)
        exact = torch.autograd.grad((expected * weights).sum(), tensors)
        for gradient, right in zip(gradients, exact, strict=True):
            torch.testing.assert_close(gradient, right, atol=2e-4, rtol=0)


def test_nothing_leaks_from_one_sequence_to_another() -> None:
    """Other tokens before and after a sequence change none of its bits."""
    tensors = [tensor.detach() for tensor in inputs()]
    first, end = BOUNDS[2:4]
    output, _ = rule_of(tensors, BOUNDS)
    others = [torch.cat([tensor[:first] * 0.5, tensor[first:end], tensor[end:].flip(0)]) for tensor in tensors]
    changed, _ = rule_of(others, BOUNDS)
    alone, _ = rule_of([tensor[first:end] for tensor in tensors], [0, end - first])
    assert torch.equal(output[first:end], changed[first:end]) and torch.equal(output[first:end], alone)
    assert not torch.equal(output[end:], changed[end:])


@pytest.mark.parametrize("given", [False, True])
def test_the_convolution_sees_its_own_sequence_alone(given: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    kernel, channels = 4, 6
    tokens = torch.randn(BOUNDS[-1], channels, generator=generator)
    weight = torch.randn(channels, kernel, generator=generator)
    before = torch.randn(len(BOUNDS) - 1, channels, kernel - 1, generator=generator) * given
    convolved = causal_convolution(tokens, weight, BOUNDS, before if given else None)
    for index, (first, end) in enumerate(pairwise(BOUNDS)):
        if first == end:
            continue
        seen = torch.cat([before[index], tokens[first:end].T], -1)
        expected = torch.nn.functional.conv1d(seen[None], weight[:, None], groups=channels)[0].T
        torch.testing.assert_close(convolved[first:end], torch.nn.functional.silu(expected))
