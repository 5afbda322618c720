"""SGLang's gated delta nets in plain PyTorch, in place of its Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine3d.platform.delta_rule import causal_convolution, gated_delta_rule, unit


def install() -> None:
    """Put the functions of this module where SGLang's gated delta nets import theirs from."""
    from sglang.jit_kernel.triton import gdn_fused_proj
    from sglang.kernels.ops.attention.fla import (
        chunk,
        fused_gdn_gating,
        fused_norm_gate,
        fused_recurrent,
        layernorm_gated,
    )
    from sglang.kernels.ops.mamba import causal_conv1d_triton

    causal_conv1d_triton.causal_conv1d_fn = _convolve
    causal_conv1d_triton.causal_conv1d_update = _convolve_next
    fused_gdn_gating.fused_gdn_gating = _gates
    chunk.chunk_gated_delta_rule = _extend
    fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode = _decode
    fused_norm_gate.rms_norm_gated = _gated_norm
    layernorm_gated.rms_norm_gated = lambda *, z, **others: _gated_norm(g=z, **others)
    gdn_fused_proj.fused_qkvzba_split_reshape_cat = _split
    gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous = _split_by_kind


def _split(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values, output gates, betas and decays, of what a projection has key head by key head.

    Args:
        qkvz: (tokens, elements) of each key head its query, its key, its values and their gates.
        ba: (tokens, elements) likewise betas and decays.
        key_heads, heads: of queries and keys, and of values.
        key_dim, value_dim: elements of a head.
    """
    per_key = heads // key_heads
    values = per_key * value_dim
    query, key, value, gate = qkvz.unflatten(-1, (key_heads, -1)).split([key_dim, key_dim, values, values], -1)
    beta, decay = ba.unflatten(-1, (key_heads, -1)).split([per_key, per_key], -1)
    mixed = torch.cat([rows.flatten(1) for rows in (query, key, value)], -1)
    return mixed, gate.reshape(-1, heads, value_dim), beta.flatten(1), decay.flatten(1)


def _split_by_kind(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of a projection that has all queries, all keys, all values and all gates; all betas and all decays."""
    values = heads * value_dim
    mixed, gate = qkvz.split([2 * key_heads * key_dim + values, values], -1)
    beta, decay = ba.split([heads, heads], -1)
    return mixed.contiguous(), gate.reshape(-1, heads, value_dim), beta.contiguous(), decay.contiguous()


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    **_others: Any,
) -> Tensor:
    """The convolution of new tokens, sequence by sequence, and SiLU.

    Args:
        x: (channels, tokens).
        weight: (channels, kernel).
        bias: always None.
        conv_states: (slots, channels, kernel - 1) latest tokens of each sequence, which are changed.
        query_start_loc: (sequences + 1,) bounds of the sequences.
        cache_indices: (sequences,) their slots.
        has_initial_state: (sequences,) True if there were tokens before.
    """
    slots, bounds = cache_indices.long(), query_start_loc.tolist()
    before = conv_states[slots] * has_initial_state[:, None, None]
    conv_states[slots] = torch.stack(
        [
            torch.cat([latest, x[:, first:last].to(latest.dtype)], -1)[:, -latest.shape[-1] :]
            for latest, first, last in zip(before, bounds[:-1], bounds[1:], strict=True)
        ]
    )
    return causal_convolution(x.T, weight, bounds, before).T


def _convolve_next(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_others: Any,
) -> Tensor:
    """The same of one new token a sequence: (sequences, channels) -> the same."""
    ones = torch.ones_like(conv_state_indices, dtype=torch.bool)
    bounds = torch.arange(len(x) + 1)
    return _convolve(x.T, weight, bias, conv_state, bounds, conv_state_indices, ones).T


def _gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, and beta: (tokens, heads) each -> (1, tokens, heads) float32 each."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_others: Any,
) -> tuple[Tensor, None, None]:
    """The gated delta rule of new tokens, sequence by sequence.

    Args:
        q, k, v: (1, tokens, heads, elements).
        g: (1, tokens, heads) logarithm of the decay, like `beta`.
        beta: of the rule.
        initial_state: (slots, heads, value_dim, key_dim) of each sequence, which is changed.
        initial_state_indices: (sequences,) their slots.
        cu_seqlens: (sequences + 1,) bounds of the sequences.
    """
    slots = initial_state_indices.long()
    output, states = gated_delta_rule(
        q[0], k[0], v[0], g[0], beta[0], cu_seqlens.tolist(), initial_state[slots].transpose(-1, -2)
    )
    initial_state[slots] = states.transpose(-1, -2).to(initial_state.dtype)
    return output[None], None, None


def _decode(
    *,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_others: Any,
) -> None:
    """One step of the rule for each sequence.

    Args:
        mixed_qkv: (sequences, elements) queries, keys and values after the convolution.
        a, b: (sequences, heads).
        A_log, dt_bias: (heads,).
        scale: of queries.
        initial_state: as of `_extend`.
        out: (sequences, 1, heads, value_dim), which is filled.
        ssm_state_indices: (sequences,) slots.
    """
    slots = ssm_state_indices.long()
    state = initial_state[slots].float()
    _, heads, value_dim, key_dim = state.shape
    keys = (mixed_qkv.shape[1] - heads * value_dim) // 2
    query, key, value = (
        rows.unflatten(-1, (-1, size))
        for rows, size in zip(
            mixed_qkv.split([keys, keys, heads * value_dim], -1), (key_dim, key_dim, value_dim), strict=True
        )
    )
    repeats = heads // query.shape[1]
    query, key = (unit(rows).repeat_interleave(repeats, 1)[..., None] for rows in (query, key))
    decay, beta = _gates(A_log, a, b, dt_bias)
    state = state * decay[0].exp()[..., None, None]
    added = (value.float() - (state @ key)[..., 0]) * beta[0][..., None]
    state = state + added[..., None] * key.mT
    initial_state[slots] = state.to(initial_state.dtype)
    out[:, 0] = ((state @ query)[..., 0] * scale).to(out.dtype)


def _gated_norm(x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **options: Any) -> Tensor:
    """RMSNorm of rows times SiLU of their gates: (rows, elements) each -> the same."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + options["eps"])
    return (weight.float() * wide * F.silu(g.float())).to(x.dtype)
