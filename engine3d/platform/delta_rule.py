"""The gated delta rule and the causal convolution before it, over packed sequences, in PyTorch.

Nothing passes from one sequence to the next: the state begins anew, and the convolution sees zeros before the first
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens that are computed at once. A sequence has chunks of its own, so that no result depends on the others."""
_NORM_EPSILON = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    bounds: list[int],
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464), in float32.

        S_t = exp(log_decay_t) * S_{t-1} + k_t (beta_t * (v_t - exp(log_decay_t) * S_{t-1}^T k_t))^T
        o_t = S_t^T q_t / sqrt(key_dim)

    Queries and keys are of length one. Within a chunk the values that are added to the state solve a triangular system.

    Args:
        query, key: (T, key heads, key_dim) of any floating dtype and length.
        value: (T, heads, value_dim); neighbouring heads have a query and a key in common.
        log_decay: (T, heads), at most 0.
        beta: (T, heads), between 0 and 1.
        bounds: of the sequences, from 0 to T.
        states: (sequences, heads, key_dim, value_dim) before the first tokens; None for zeros.

    Returns:
        (T, heads, value_dim) in the value's dtype, and the states after the last tokens, float32.
    """
    chunks = _Chunks.of(bounds, value.device)
    heads, key_dim = value.shape[1], key.shape[-1]

    def chunked(tensor: Tensor) -> Tensor:
        """(T, heads, ...) -> float32 (chunks, heads, CHUNK, ...), zero where a chunk has no token."""
        padded = F.pad(tensor.float(), (0, 0) * (tensor.dim() - 1) + (0, 1))
        return padded[chunks.tokens].transpose(1, 2)

    repeats = heads // key.shape[1]
    query, key = (chunked(unit(tensor)).repeat_interleave(repeats, 1) for tensor in (query, key))
    query, values, beta = query * key_dim**-0.5, chunked(value), chunked(beta)[..., None]
    decay = chunked(log_decay).cumsum(-1)
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    since_start, until_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]

    system = ((key * beta) @ key.mT * between).tril(-1)
    added = torch.cat([values, key * since_start], -1) * beta
    added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    values, keys = added.split([values.shape[-1], key_dim], -1)
    scores, carried, query = query @ key.mT * between, key * until_end, query * since_start

    state = value.new_zeros(len(bounds) - 1, heads, key_dim, value.shape[-1], dtype=torch.float32)
    if states is not None:
        state = states.float()[chunks.order]
    ended, outputs = [], []
    for first, last in chunks.steps:
        ended.append(state[last - first :])
        state, step = state[: last - first], slice(first, last)
        new = values[step] - keys[step] @ state
        outputs.append(query[step] @ state + scores[step] @ new)
        state = state * since_start[step, :, -1:] + carried[step].mT @ new
    ended.append(state)
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[chunks.slots]
    return output.to(value.dtype), torch.cat(ended[::-1])[chunks.order.argsort()]


def causal_convolution(tokens: Tensor, weight: Tensor, bounds: list[int], before: Tensor | None = None) -> Tensor:
    """A convolution of each channel over a token and those before it in its sequence, then SiLU, in float32.

    Args:
        tokens: (T, channels) of any floating dtype.
        weight: (channels, kernel), the last of a token itself.
        bounds: of the sequences, from 0 to T.
        before: (sequences, channels, kernel - 1) tokens before the first ones, the latest last; None for zeros.

    Returns:
        (T, channels) of the dtype of `tokens`.
    """
    kernel, wide, weight = weight.shape[1], tokens.float(), weight.float()
    starts = torch.tensor(bounds[:-1], device=tokens.device)
    sequence = torch.repeat_interleave(torch.tensor(bounds, device=tokens.device).diff())
    position = torch.arange(len(tokens), device=tokens.device) - starts[sequence]
    total = wide * weight[:, -1]
    for back in range(1, kernel):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(wide)] * (position >= back)[:, None]
        if before is not None:
            rows = (position < back).nonzero()[:, 0]
            earlier[rows] = before.float()[sequence[rows], :, position[rows] - back]
        total = total + earlier * weight[:, -1 - back]
    return F.silu(total).to(tokens.dtype)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of packed sequences: the first of all sequences, the longest first, then their second ones, ...

    Args:
        tokens: (chunks, CHUNK) the token at each place, T where there is none.
        slots: (T,) the place of each token, counted over all chunks.
        order: (sequences,) numbers of the sequences, the longest first.
        steps: of the first, second, ... chunks of all sequences that have one: the first, and the one after the last.
    """

    tokens: Tensor
    slots: Tensor
    order: Tensor
    steps: list[tuple[int, int]]

    @classmethod
    def of(cls, bounds: list[int], device: torch.device) -> _Chunks:
        edges = torch.tensor(bounds)
        lengths = edges.diff()
        order = lengths.argsort(descending=True, stable=True)
        counts = (lengths[order] + CHUNK - 1) // CHUNK
        sequences = [order[counts > step] for step in range(int(counts[0]))]
        starts = torch.cat([edges[rows] + step * CHUNK for step, rows in enumerate(sequences)])
        ends = torch.cat([edges[rows + 1] for rows in sequences])
        tokens = starts[:, None] + torch.arange(CHUNK)
        present = tokens < ends[:, None]
        slots = torch.empty(bounds[-1], dtype=torch.long)
        slots[tokens[present]] = present.flatten().nonzero()[:, 0]
        tokens = tokens.where(present, bounds[-1])
        steps = list(pairwise([0, *accumulate(len(rows) for rows in sequences)]))
        return cls(tokens.to(device), slots.to(device), order.to(device), steps)


def unit(tensor: Tensor) -> Tensor:
    """Vectors of length one, float32. (..., elements) of any floating dtype -> the same shape."""
    wide = tensor.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPSILON)
