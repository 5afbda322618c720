"""Memory of one rank of a rollout engine: its weights, and its KV cache for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.models.family import ModelSpec
from engine3d.models.files.multi_token import KeptTensors
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import target_names
from engine3d.models.precision import quantisation_config, served_tensors
from engine3d.models.sizes import Sizes
from engine3d.reshard.describe.shards import Buffer, Location, RankShards
from engine3d.reshard.plan.aliases import find_aliases
from engine3d.rollout.cache import STATES_OF_A_REQUEST
from engine3d.rollout.config import ADAPTER_SLOTS, RolloutConfig
from engine3d.startup.imports import quick_imports
from engine3d.startup.lazy_imports import torch

PREFIX_TOKENS = 128 * 1024
"""Tokens of a prefix whose keys and values SGLang makes at a time: its SGLANG_MAX_KV_CHUNK_CAPACITY."""

_PROMPT_TOKENS = {35: 2048, 60: 4096, 160: 8192}
"""Tokens of prompts that SGLang reads at a time on GPUs of less than these GiB: its `chunked_prefill_size`."""

_MOST_PROMPT_TOKENS = 16384
"""On larger ones; and its `max_prefill_tokens`, which holds where prompts are not cut."""


@dataclass(frozen=True, slots=True)
class ServingBytes:
    """Bytes of a rank.

    Args:
        weights: of its parameters, and of what is made from them once.
        shared: of which these are memory of a trainer's rank on its device.
        cache_of_a_token: in the KV cache.
        prefix_of_a_token: while a prompt is read, of a token of its prefix that is in the cache.
        prompt_of_a_token: while a prompt is read, of a token of it.
        routes_of_a_token: in host memory, for each token that the KV cache has room for.
        states: of gated delta nets, of all requests and prefixes.
    """

    weights: int
    shared: int
    cache_of_a_token: int
    prefix_of_a_token: int
    prompt_of_a_token: int
    routes_of_a_token: int = 0
    states: int = 0


def serving_by_rank(
    spec: ModelSpec,
    config: RolloutConfig,
    locations: Sequence[Location],
    sources: Sequence[RankShards] = (),
    adapters: LoraConfig | None = None,
) -> list[ServingBytes]:
    """Predict the memory of every rank of some engines of one kind, as SGLang's own loader lays it out.

    Takes half a minute, most of it to import SGLang.

    Args:
        spec: the model.
        config: of each engine.
        locations: of all ranks, engine after engine.
        sources: the trainer's ranks whose memory the engines may use.
        adapters: that the engines have apart from the model.

    Raises:
        UserError: SGLang refuses the model or the layout.
    """
    with quick_imports():
        import sglang.srt.layers.sampler  # noqa: F401  before a stand-in rank makes torch's logger ask for one

    from engine3d.reshard.describe.adapter import pooled_elements
    from engine3d.reshard.describe.simulate import trace_engine_layout

    dtype = getattr(torch, config.dtype)
    spec = replace(spec, mtp=False)  # SGLang has the layer that drafts as a model of its own
    traces = trace_engine_layout(
        spec.hf_config,
        served_tensors(spec, dtype, config.precision),
        config.tp,
        config.ep,
        dtype,
        config.server_args,
        config.attention_dp,
        quantisation_config(spec) if config.precision is not None else None,
    )
    drafting = 1 if config.draft_tokens else 0
    cache = cache_of_a_token(spec.sizes, config.attention_tp, config.cache_itemsize, drafting)
    prefix = prefix_of_a_token(spec.sizes, config.attention_tp, dtype.itemsize)
    prompt = prompt_of_a_token(spec.sizes, config.tp, config.ep, dtype.itemsize)
    absorbed = absorbed_weights(spec.sizes, config.attention_tp, dtype.itemsize, drafting)
    routes = routes_of_a_token(spec.sizes) if config.routes else 0
    states = STATES_OF_A_REQUEST * config.most_requests * state_of_a_request(spec.sizes, config.tp, dtype.itemsize)
    kept = KeptTensors(spec, spec.directory, dtype, multi_token=False)  # SGLang's model has the vision tower too
    tower = sum(prod(shape) for shape, _ in kept.tensors.values())
    predicted = []
    for number, location in enumerate(locations):
        trace = traces[number % config.tp]
        target = RankShards(f"engine rank {number}", number, location, trace.buffers, trace.holdings)
        near = [source for source in sources if source.location == location]
        aliases = find_aliases(near, target) if near else ()
        shared = sum(_nbytes(trace.buffers[alias.target_buffer]) for alias in aliases)
        responds = number % config.tp % config.attention_tp == 0
        weights = sum(map(_nbytes, trace.buffers)) + absorbed + tower * dtype.itemsize
        if drafting:
            weights += drafting_weights(spec.sizes, trace.buffers, dtype.itemsize)
        if adapters is not None:
            elements = pooled_elements(trace, adapters, target_names(spec), spec.sizes.layers)
            weights += ADAPTER_SLOTS * elements * dtype.itemsize
        predicted.append(ServingBytes(weights, shared, cache, prefix, prompt, routes if responds else 0, states))
    return predicted


def cache_of_a_token(sizes: Sizes, tp: int, itemsize: int, drafting: int = 0) -> int:
    """Bytes of keys and values of one token on one rank that has it, over all layers.

    SGLang cuts key heads over the `tp` ranks of its attention, of which each has at least one; a latent is on all.
    `drafting`: number of layers that draft.
    """
    layers = sizes.attention_layers + drafting
    if sizes.latent is not None:
        return (sizes.latent.key_value_rank + sizes.latent.rotary_dim) * layers * itemsize
    return max(1, sizes.groups // tp) * (sizes.head_dim + sizes.value_dim) * layers * itemsize


def drafting_weights(sizes: Sizes, buffers: Sequence[Buffer], itemsize: int) -> int:
    """Bytes of a layer for multi-token prediction on one rank: those of the last layer, three norms, a projection.

    Args:
        sizes: of the model.
        buffers: of the rank's model.
        itemsize: of an element.
    """
    last = f"model.layers.{sizes.layers - 1}."
    of_layer = sum(_nbytes(buffer) for buffer in buffers if buffer.name.startswith(last))
    return of_layer + (3 + 2 * sizes.hidden) * sizes.hidden * itemsize


def state_of_a_request(sizes: Sizes, tp: int, itemsize: int) -> int:
    """Bytes of the states of gated delta nets of one request on one rank, over all layers.

    A state is float32. Of the convolution the tokens before the next one are kept.
    """
    if (delta := sizes.delta) is None:
        return 0
    convolved = (2 * delta.keys + delta.values) * (delta.kernel - 1) * itemsize
    return (sizes.layers - sizes.attention_layers) * (4 * delta.key_dim * delta.values + convolved) // tp


def routes_of_a_token(sizes: Sizes) -> int:
    """Bytes of a token's routes in host memory, on each rank that sends responses (`RouteCapturer`)."""
    from engine3d.models.experts.routes import RouteFormat

    return RouteFormat.of(sizes).token_bytes


def prefix_of_a_token(sizes: Sizes, tp: int, itemsize: int) -> int:
    """Bytes of a token of a prefix in one layer on one rank, where keys and values of its heads come from a latent.

    They are made together. Then keys are joined with their rotated dimensions. See `_chunked_prefix_attn_mha` in
    SGLang's models/deepseek_common/attention_forward_methods/forward_mha.py.
    """
    latent = sizes.latent
    if latent is None:
        return 0
    of_heads = (sizes.from_latent + sizes.heads * sizes.head_dim) // tp
    return (latent.key_value_rank + latent.rotary_dim + of_heads) * itemsize


def prompt_tokens(config: RolloutConfig, gpu_bytes: int) -> int:
    """Tokens of prompts that an engine reads at a time on GPUs of that size, a single longer prompt aside."""
    default = next((tokens for gib, tokens in _PROMPT_TOKENS.items() if gpu_bytes < gib << 30), _MOST_PROMPT_TOKENS)
    size = config.server_args.get("chunked_prefill_size") or default
    return size if size > 0 else config.server_args.get("max_prefill_tokens") or _MOST_PROMPT_TOKENS


def prompt_of_a_token(sizes: Sizes, tp: int, ep: int, itemsize: int) -> int:
    """Bytes of a token of a prompt on one rank in the widest layer: its input, the residual, and what its MLP makes.

    Gate and up together, their product, and of experts what each of a token's gives: each a block that PyTorch's
    allocator keeps for the next layer. SGLang allocates for all of a token's experts on every rank. See its
    layers/moe/moe_runner/triton_utils/fused_moe.py.
    """
    dense = 3 * sizes.ffn // tp
    experts = sizes.experts_per_token * (3 * sizes.expert_ffn * ep // tp + sizes.hidden) + 3 * sizes.shared_ffn // tp
    widest = max(experts if sizes.is_sparse(layer) else dense for layer in range(sizes.layers))
    return (2 * sizes.hidden + widest) * itemsize


def absorbed_weights(sizes: Sizes, tp: int, itemsize: int, drafting: int = 0) -> int:
    """Bytes of the copies of `kv_b_proj` on one rank, over all layers, with which a latent is used as it is."""
    if sizes.latent is None:
        return 0
    return (sizes.layers + drafting) * sizes.from_latent // tp * sizes.latent.key_value_rank * itemsize


def _nbytes(buffer: Buffer) -> int:
    return prod(buffer.shape) * ITEMSIZES[buffer.dtype]
