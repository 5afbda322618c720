"""Floating point operations of a model on sequences, from its sizes alone.

Counted are matrix multiplications, an (m, k) by a (k, n) one as 2 * m * n * k: projections, MLPs, routers, the experts
that a token is given to, and the output layer or the value head's vector. Of attention's scores and of their sum over
values the causal half counts, n^2 / 2 pairs for n tokens. Of gated delta nets the recurrence counts, whose state each
token reads twice and changes once: chunks of tokens multiply more. Norms, convolutions, activations, rotary embeddings,
softmax, biases and look-ups in the embedding are not counted, nor is anything that is computed only because of padding,
of a pipeline, or again in the backward pass.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine3d.models.family import ModelSpec
from engine3d.models.sizes import Sizes

PASSES_OF_AN_UPDATE = 3
"""Forward and backward pass over the forward pass alone: each multiplication has two in the backward pass, one for the
gradient of each factor (Narayanan et al. 2021, arXiv 2104.04473, appendix)."""


def sequence_flops(spec: ModelSpec, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Operations of one forward pass over each sequence on its own; `PASSES_OF_AN_UPDATE` times as many for an update.

    Args:
        spec: the model; its value head, where it has one, is what is multiplied at the end.
        lengths: tokens of each sequence, of any shape.

    Returns:
        float64 of the same shape.
    """
    tokens, sizes = np.asarray(lengths, np.float64), spec.sizes
    flops = tokens * (token_flops(spec) + state_flops(sizes) + tokens * pair_flops(sizes))
    if sizes.window is not None:  # pairs that are further apart
        flops -= sum(sizes.windowed) / sizes.layers * pair_flops(sizes) * np.maximum(tokens - sizes.window, 0) ** 2
    return flops


def update_flops(spec: ModelSpec, lengths: npt.ArrayLike, *, adapters: bool) -> npt.NDArray[np.float64]:
    """Operations of an update with each sequence on its own, of the shape of `lengths`.

    Args:
        spec: the model.
        lengths: tokens of each sequence, of any shape.
        adapters: True if only adapters are trained. A frozen weight has one multiplication in the backward pass, for
            the gradient of its input. Those of adapters are not counted.
    """
    flops = PASSES_OF_AN_UPDATE * sequence_flops(spec, lengths)
    return flops - np.asarray(lengths, np.float64) * token_flops(spec) if adapters else flops


def token_flops(spec: ModelSpec) -> int:
    """Operations of one forward pass for each token, attention's scores and sums left out."""
    sizes = spec.sizes
    sparse = sum(sizes.sparse)
    router = _linear(sizes.hidden, sizes.experts)
    experts = sizes.experts_per_token * _gated(sizes, sizes.expert_ffn) + _gated(sizes, sizes.shared_ffn)
    experts += _linear(sizes.hidden, 1) if sizes.shared_gate else 0
    mlps = (sizes.layers - sparse) * _gated(sizes, sizes.ffn) + sparse * (router + experts)
    head = _linear(sizes.hidden, 1 if spec.value_head else sizes.vocabulary)
    linear = sizes.layers - sizes.attention_layers
    return sizes.attention_layers * _projections(sizes) + linear * _delta_projections(sizes) + mlps + head


def pair_flops(sizes: Sizes) -> int:
    """Operations of attention in one forward pass over n tokens, by n^2: a score and a sum for half of all pairs.

    Windows are not counted.
    """
    return sizes.attention_layers * sizes.heads * (sizes.head_dim + sizes.value_dim)


def state_flops(sizes: Sizes) -> int:
    """Operations of gated delta nets on their states in one forward pass for each token."""
    if (delta := sizes.delta) is None:
        return 0
    return (sizes.layers - sizes.attention_layers) * 3 * 2 * delta.key_dim * delta.values


def _delta_projections(sizes: Sizes) -> int:
    """FLOPs of a token's projections into and out of a gated delta net."""
    if (delta := sizes.delta) is None:
        return 0
    inputs = _linear(sizes.hidden, 2 * (delta.keys + delta.values + delta.value_heads))
    return inputs + _linear(delta.values, sizes.hidden)


def _projections(sizes: Sizes) -> int:
    """FLOPs of a token's projections into queries, keys and values and out of attention."""
    hidden, queries = sizes.hidden, sizes.heads * sizes.head_dim
    output = _linear(sizes.heads * sizes.value_dim, hidden)
    latent = sizes.latent
    if latent is None:
        return _linear(hidden, queries * (1 + sizes.output_gate) + 2 * sizes.groups * sizes.head_dim) + output
    if latent.query_rank is None:
        to_queries = _linear(hidden, queries)
    else:
        to_queries = _linear(hidden, latent.query_rank) + _linear(latent.query_rank, queries)
    to_latent = _linear(hidden, latent.key_value_rank + latent.rotary_dim)
    return to_queries + to_latent + _linear(latent.key_value_rank, sizes.from_latent) + output


def _gated(sizes: Sizes, intermediate: int) -> int:
    """A gated MLP: gate, up and down projection."""
    return 3 * _linear(sizes.hidden, intermediate)


def _linear(inputs: int, outputs: int) -> int:
    return 2 * inputs * outputs
