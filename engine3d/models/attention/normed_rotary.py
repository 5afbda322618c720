"""Queries, keys and values of attention from one projection: fused norms and rotary embedding.

The code in PyTorch here is for the CPU, and is what the kernels for GPUs are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def normed_and_rotated(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    angles: Tensor,
    positions: Tensor,
    *,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with RMSNorm and rotary embedding, and values, of T tokens.

        n = x / sqrt(mean(x^2) + eps) * weight        in float32, rounded to the dtype of `mixed`
        y = n * cos + (-n2, n1) * sin                 in float32, rounded once

    where n1 and n2 are the halves of n. The backward pass keeps `mixed`, and nothing else as large.

    Args:
        mixed: (T, ...) of any floating dtype; of each token, group by group, its query heads, its key and its value.
        query_weight: (head_dim,) of the norm of every query head.
        key_weight: (head_dim,) of the norm of every key head.
        angles: (S, 1, 1, head_dim) float32, contiguous: Megatron-Core's rotary embedding, whose halves are the same.
        positions: (T,) int32, the row of `angles` of each token.
        groups: query groups, that is key and value heads.
        eps: of both norms.

    Returns:
        queries (T, heads, head_dim), keys and values (T, groups, head_dim), contiguous, of the dtype of `mixed`.
    """
    made: tuple[Tensor, Tensor, Tensor] = _NormedAndRotated.apply(  # type: ignore[no-untyped-call]
        mixed.reshape(len(positions), groups, -1).contiguous(), query_weight, key_weight, angles, positions, eps
    )
    return made


def has_kernels(device: torch.device, head_dim: int) -> bool:
    """True if GPU kernels compute it: they halve the heads, and Triton's tiles are powers of two."""
    return device.type == "cuda" and head_dim > 1 and head_dim.bit_count() == 1


class _NormedAndRotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, query_weight: Tensor, key_weight: Tensor, angles: Tensor, positions: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, query_weight, key_weight, angles, positions)
        ctx.eps = eps
        if has_kernels(mixed.device, len(query_weight)):
            from engine3d.models.attention.kernels import forward

            return forward(mixed, query_weight, key_weight, angles, positions, eps)
        return heads_of(mixed, query_weight, key_weight, angles, positions, eps)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, angles, positions = ctx.saved_tensors
        of_query, of_key, of_value = (gradient.contiguous() for gradient in gradients)
        given = (mixed, query_weight, key_weight, angles, positions, ctx.eps, of_query, of_key, of_value)
        trained = ctx.needs_input_grad[1:3]
        if has_kernels(mixed.device, len(query_weight)):
            from engine3d.models.attention.kernels import backward

            of_mixed, of_weights = backward(*given, weights=any(trained))
        else:
            of_mixed, of_weights = gradients_of(*given)
        weights = zip(of_weights, (query_weight, key_weight), trained, strict=True)
        weight_gradients = (total.to(weight.dtype) if needed else None for total, weight, needed in weights)
        return of_mixed, *weight_gradients, *[None] * 3


def heads_of(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, angles: Tensor, positions: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`normed_and_rotated` in PyTorch, of `mixed` as (T, groups, (heads / groups + 2) * head_dim)."""
    tokens, groups, _ = mixed.shape
    queries, keys, values = _split(mixed, len(query_weight))
    cos, sin = _turn(angles, positions)
    turned = []
    for heads, weight in ((queries, query_weight), (keys, key_weight)):
        wide = heads.float()
        normed = (wide * _scale(wide, eps) * weight.float()).to(mixed.dtype).float()
        first, second = normed.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        turned.append(rotated.to(mixed.dtype).reshape(tokens, -1, len(weight)))
    return turned[0], turned[1], values.reshape(tokens, groups, -1).clone(memory_format=torch.contiguous_format)


def gradients_of(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    angles: Tensor,
    positions: Tensor,
    eps: float,
    of_query: Tensor,
    of_key: Tensor,
    of_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the results of `heads_of`, in PyTorch.

    Args:
        mixed, query_weight, key_weight, angles, positions, eps: as of `heads_of`.
        of_query: (T, heads, head_dim) of the queries.
        of_key: (T, groups, head_dim) of the keys.
        of_value: (T, groups, head_dim) of the values.

    Returns:
        the gradient of `mixed`, of its shape and dtype, and those of both weights, (2, head_dim) float32.
    """
    queries, keys, values = _split(mixed, len(query_weight))
    cos, sin = _turn(angles, positions)
    of_heads, of_weights = [], []
    for heads, weight, gradient in ((queries, query_weight, of_query), (keys, key_weight, of_key)):
        wide = heads.float()
        scale = _scale(wide, eps)
        normed = wide * scale
        first, second = gradient.float().reshape(wide.shape).chunk(2, dim=-1)
        of_turned = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        of_weights.append((of_turned * normed).sum(dim=(0, 1, 2)))
        of_normed = of_turned * weight.float()
        of_wide = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
        of_heads.append(of_wide.to(mixed.dtype))
    of_mixed = torch.cat([*of_heads, of_value.reshape(values.shape)], dim=2)
    return of_mixed.view(mixed.shape), torch.stack(of_weights)


def _split(mixed: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> (T, groups, heads / groups, head_dim) queries, and keys and values as (T, groups, 1, head_dim)."""
    heads = mixed.view(*mixed.shape[:2], -1, head_dim)
    return heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]


def _turn(angles: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's angles, float32 (T, 1, 1, head_dim / 2)."""
    of_tokens = angles[positions, ..., : angles.shape[-1] // 2]
    return of_tokens.cos(), of_tokens.sin()


def _scale(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
