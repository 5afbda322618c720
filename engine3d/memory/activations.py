"""Activations that each layer saves of a micro-batch for the backward pass, in bytes a token: Transformer Engine's
layers in bf16.

A token counts once for the ranks of a tensor-parallel group, which share its work. The ranks of a context-parallel
group share the tokens themselves. Every name below is a tensor that a layer saves; tensors that two layers share count
where they are made.
"""

from __future__ import annotations

from engine3d.layout import Layout
from engine3d.models.sizes import Delta, Latent, Sizes

_FLOAT32 = 4
_ROUTER_COPIES = 3
"""Float32 tensors of the router with a value for each expert: logits, probabilities, and their normalised form."""
_ROW_BYTES = 16
_CHUNK = 64
"""Tokens of a chunk of gated delta nets."""


def saved_by_layer(
    sizes: Sizes,
    layout: Layout,
    layer: int,
    itemsize: int,
    *,
    sequence_parallel: bool,
    fused_experts: bool,
    fused_query_key: bool = False,
    capacity: float = 1.0,
) -> float:
    """Bytes a token that one layer saves, without recomputation.

    Routed tokens are taken to be spread evenly over the ranks.

    Args:
        sizes: the model's.
        layout: how it is cut.
        layer: its number.
        itemsize: of the dtype that the model computes in.
        sequence_parallel: norms and routing are cut over tp too.
        fused_experts: experts are fused, which gathers their input and computes their activation again.
        fused_query_key: queries and keys are fused, which keeps the complete projection that they are made from.
        capacity: for rows of experts, over the rows of an even load.
    """
    spread = layout.tp if sequence_parallel else 1
    if not sizes.is_sparse(layer):
        mlp = _dense_mlp(sizes, layout, spread, itemsize)
    elif fused_experts:
        mlp = _saved_by_fused_experts(sizes, layout, spread, itemsize, capacity)
    else:
        mlp = _experts(sizes, layout, spread, itemsize)
    if sizes.is_linear(layer) and sizes.delta is not None:
        return _delta_net(sizes, sizes.delta, layout.tp, spread, itemsize) + mlp
    attention = saved_by_attention(
        sizes, layout, itemsize, sequence_parallel=sequence_parallel, fused_query_key=fused_query_key
    )
    return attention + mlp


def saved_by_attention(
    sizes: Sizes, layout: Layout, itemsize: int, *, sequence_parallel: bool, fused_query_key: bool = False
) -> float:
    """Bytes a token that attention saves of one layer, with the norm before it."""
    spread = layout.tp if sequence_parallel else 1
    # The values a second time: in the projection.
    values = max(1, sizes.groups / layout.tp) * sizes.head_dim if fused_query_key else 0
    return _attention(sizes, layout.tp, spread, itemsize) + itemsize * values


def made_by_ring(sizes: Sizes, layout: Layout, itemsize: int) -> float:
    """Bytes a token that the forward pass of attention over a context-parallel group takes next to what it saves.

    Keys and values of every rank arrive one after another, each in a buffer of its own, and a step's output is kept for
    each of them. All stay until attention returns. See `AttnFuncWithCPAndKVP2P.forward` in Transformer Engine's
    pytorch/attention/dot_product_attention/context_parallel.py, `p2p_comm_buffers` and `out_per_step`. Outputs count
    as on the last rank: on others some are of half of the tokens.
    """
    if layout.cp == 1:
        return 0.0
    output = sizes.heads / layout.tp * sizes.value_dim
    return itemsize * ((layout.cp - 1) * keys_and_values(sizes, layout.tp) + layout.cp * output)


def gradients_of_ring(sizes: Sizes, layout: Layout, itemsize: int) -> float:
    """Bytes a token that the backward pass of attention over a context-parallel group takes next to what is saved.

    Two buffers with keys, values and their gradients, of which one is sent while the other is received, and the
    gradients of the output, of queries, and of a step's queries, keys and values. See
    `AttnFuncWithCPAndKVP2P.backward`.
    """
    if layout.cp == 1:
        return 0.0
    heads = sizes.heads / layout.tp
    queries, output = heads * sizes.head_dim, heads * sizes.value_dim
    return itemsize * (5 * keys_and_values(sizes, layout.tp) + 2 * queries + output)


def saved_for_balance(sizes: Sizes, layout: Layout, layer: int, *, sequence_parallel: bool) -> float:
    """Bytes a token that one layer saves for balance losses: each expert's score, and by what that is multiplied."""
    if not sizes.is_sparse(layer):
        return 0.0
    return 2 * _FLOAT32 * sizes.experts / (layout.tp if sequence_parallel else 1)


def hidden_state(sizes: Sizes, layout: Layout, itemsize: int, *, sequence_parallel: bool) -> float:
    """Bytes a token of what goes from layer to layer: all that full recomputation keeps of one."""
    return sizes.hidden * itemsize / (layout.tp if sequence_parallel else 1)


def made_again_by_layer(
    sizes: Sizes, layout: Layout, layer: int, itemsize: int, *, sequence_parallel: bool, fused_experts: bool
) -> float:
    """Bytes a token of what one layer saves that selective recomputation does without.

    Of experts their products and the norm before them, of latent attention the norm and what is projected up. Other
    norms are part of the projection after them.
    """
    spread = layout.tp if sequence_parallel else 1
    elements = 0.0
    if sizes.is_sparse(layer):
        product = 0 if fused_experts else sizes.experts_per_token * sizes.expert_ffn
        elements += (product + sizes.hidden) / spread
    if sizes.latent is not None:
        elements += sizes.hidden / spread + sum(_projected_up(sizes, sizes.latent, layout.tp))
    return itemsize * elements


def gradients_of_layer(
    sizes: Sizes,
    layout: Layout,
    layer: int,
    itemsize: int,
    *,
    sequence_parallel: bool,
    fused_experts: bool,
    capacity: float = 1.0,
) -> float:
    """Bytes a token that the backward pass of one layer takes next to what is saved: the widest gradients at a time."""
    spread = layout.tp if sequence_parallel else 1
    if not sizes.is_sparse(layer):
        return 2 * sizes.ffn / layout.tp * itemsize
    rows = sizes.experts_per_token / spread * capacity
    if not fused_experts:
        return 2 * rows * sizes.hidden * itemsize
    gathered = layout.ep / spread * sizes.hidden
    of_activation = gathered + rows * (sizes.hidden + 4 * sizes.expert_ffn)
    of_tokens = 2 * gathered + rows * (sizes.hidden + 2 * sizes.expert_ffn)
    return max(of_activation, of_tokens) * itemsize


def made_by_experts(
    sizes: Sizes, layout: Layout, layer: int, itemsize: int, *, sequence_parallel: bool, capacity: float = 1.0
) -> float:
    """Bytes a token of a layer's fused experts while the layer computes, without what it saves."""
    if not sizes.is_sparse(layer):
        return 0.0
    spread = layout.tp if sequence_parallel else 1
    gathered, rows = layout.ep / spread * sizes.hidden, sizes.experts_per_token / spread * capacity
    return (rows * sizes.hidden + max(gathered, rows * sizes.expert_ffn)) * itemsize


def gradients_of_experts(sizes: Sizes, layout: Layout, itemsize: int) -> int:
    """Bytes of the gradients of the first weights of a rank's experts, which are made before they are added up."""
    return itemsize * sizes.experts // layout.ep * 2 * sizes.expert_ffn // layout.etp * sizes.hidden


def _attention(sizes: Sizes, tp: int, spread: int, itemsize: int) -> float:
    inputs = 2 * sizes.hidden / spread  # of the norm, and of the projection after it
    heads = sizes.heads / tp
    core = _latent(sizes, sizes.latent, tp) if sizes.latent is not None else _grouped(sizes, tp, heads)
    output = heads * sizes.value_dim * (3 if sizes.output_gate else 1)  # the gate, and the product
    statistics = _FLOAT32 * heads  # log-sum-exp
    return itemsize * (inputs + core + output) + statistics


def _delta_net(sizes: Sizes, delta: Delta, tp: int, spread: int, itemsize: int) -> float:
    """Bytes a token that a gated delta net saves of one layer, with the norm before it.

    Its projection, convolution, rule and norm compute in float32 in PyTorch (`delta_rule`): the numbers are those of
    the tensors that autograd saves of queries and keys, of values, of each value head's copy of a query and a key, and
    of a row of a chunk's matrices. A chunk also saves a state.
    """
    inputs = 2 * sizes.hidden / spread
    of_head = 7 * delta.key_dim + 6 * _CHUNK + 9 + delta.key_dim * delta.value_dim / _CHUNK
    saved = 12 * delta.keys + 14 * delta.values + delta.value_heads * of_head
    return itemsize * inputs + _FLOAT32 * saved / tp


def _grouped(sizes: Sizes, tp: int, heads: float) -> float:
    """Elements of queries, keys and values as attention takes them, and before their norms."""
    groups = max(1, sizes.groups / tp)
    turned = (heads + groups) * sizes.head_dim
    # A norm over all heads is not fused: its input is kept in float32, and its result before the weight.
    before = 3 * turned if sizes.norm_over_heads else turned if sizes.qk_norm else 0
    return turned + before + groups * sizes.head_dim


def keys_and_values(sizes: Sizes, tp: int) -> float:
    """Elements of a token's keys and values on a rank. Those from a latent are of every head."""
    heads = sizes.heads if sizes.latent is not None else sizes.groups
    return max(1, heads / tp) * (sizes.head_dim + sizes.value_dim)


def _latent(sizes: Sizes, latent: Latent, tp: int) -> float:
    """Elements of multi-head latent attention, of which the ranks of a tensor-parallel group all make the latents."""
    to_queries = 2 * latent.query_rank if latent.query_rank is not None else 0  # before the norm and after it
    to_keys = 2 * latent.key_value_rank + latent.rotary_dim
    return to_queries + to_keys + sum(_projected_up(sizes, latent, tp))


def _projected_up(sizes: Sizes, latent: Latent, tp: int) -> tuple[float, float, float]:
    """Elements of queries, of keys and values, and of all as attention takes them."""
    queries, values = sizes.heads * sizes.head_dim / tp, sizes.heads * latent.value_dim / tp
    return queries, sizes.from_latent / tp, 2 * queries + values


def _dense_mlp(sizes: Sizes, layout: Layout, spread: int, itemsize: int) -> float:
    inputs = 2 * sizes.hidden / spread
    return itemsize * (inputs + 3 * sizes.ffn / layout.tp)  # gate and up, and their product


def _experts(sizes: Sizes, layout: Layout, spread: int, itemsize: int) -> float:
    routed = sizes.experts_per_token / spread
    # Gate and up, and their product. Experts with biases also keep gate and up apart, both within their limits, the
    # activation, and the product before the router's weight.
    widths = 8 if sizes.expert_biases else 3
    # Each of the ranks that share an expert sees the tokens of all of them, and computes its share of the width.
    given = routed * (layout.etp * sizes.hidden + widths * sizes.expert_ffn)
    return itemsize * given + _FLOAT32 * routed + _beside_experts(sizes, layout, spread, itemsize)


def _saved_by_fused_experts(sizes: Sizes, layout: Layout, spread: int, itemsize: int, capacity: float) -> float:
    routed = sizes.experts_per_token / spread
    # Token, index and score of each row, with capacity for all tokens of all ranks, and the rows of each token.
    rows = layout.ep * (_ROW_BYTES * routed + 4 * (routed + 1 / spread))
    return itemsize * routed * capacity * 2 * sizes.expert_ffn + rows + _beside_experts(sizes, layout, spread, itemsize)


def _beside_experts(sizes: Sizes, layout: Layout, spread: int, itemsize: int) -> float:
    """Bytes a token of the norm, the shared expert and the router."""
    gated = sizes.hidden + 1 if sizes.shared_gate else 0  # what the gate scales, and the gate
    inputs = (2 * sizes.hidden + gated) / spread
    shared = 3 * sizes.shared_ffn / layout.tp
    router = (_ROUTER_COPIES * _FLOAT32 + 1) * sizes.experts / spread
    return itemsize * (inputs + shared) + router
