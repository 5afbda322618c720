"""The sizes and switches of a model, as its rules and its Megatron configuration need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine3d.models.files.hf_config import HFConfig

ROW_ELEMENTS = 8
"""Grouped GEMMs need rows of bf16 that are multiples of these elements, that is of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention.

    Args:
        query_rank: elements that a token's queries are made from; None where they are made from its hidden state.
        key_value_rank: elements that a token's keys and values are made from.
        rotary_dim: elements of a query and key head that turn with the position; the key's are common to all heads.
        value_dim: elements of a value head.
    """

    query_rank: int | None
    key_value_rank: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Sizes of gated delta nets, which are the linear attention of some layers.

    Args:
        key_heads: query heads, and key heads.
        value_heads: a multiple of these. Neighbours have a query and a key in common.
        key_dim: elements of a query and key head.
        value_dim: elements of a value head.
        kernel: tokens that the causal convolution of queries, keys and values sees, a token itself included.
        linear: for each layer, True if it has a gated delta net in place of attention.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    linear: tuple[bool, ...]

    @property
    def keys(self) -> int:
        """Elements of a token's queries over all heads, and of its keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values over all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and switches read from a HuggingFace config.

    Args:
        layers: transformer layers.
        hidden: width of the residual stream.
        vocabulary: tokens, without padding.
        heads: query heads.
        groups: query groups, that is key and value heads.
        head_dim: elements of a query and key head, and without latent attention of a value head.
        ffn: intermediate size of a dense MLP.
        max_positions: longest sequence that the model was made for, in tokens.
        norm_epsilon: epsilon of every RMSNorm.
        initializer_range: standard deviation of random weights.
        tied: whether the output layer is the embedding.
        qk_norm: whether queries and keys are normalised, each head by itself.
        norm_over_heads: True if they are normalised over all heads of a token instead.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        output_bias: whether attention's output projection has one.
        mlp_bias: whether the linear layers of the MLP have a bias.
        expert_biases: True if those of experts have one, and the router.
        sinks: True if each query head has a learned score that takes part in the softmax and has no value.
        window: positions that a token attends to in windowed layers, itself included; None without such layers.
        windowed: for each layer, True if its attention has that window.
        experts: routed experts of a sparse layer; 0 in a dense model.
        experts_per_token: of which each token uses this many.
        expert_ffn: intermediate size of one expert.
        shared_ffn: intermediate size of the expert that every token is given to; 0 where there is none.
        shared_gate: whether a sigmoid of the token scales what the shared expert makes of it.
        expert_groups: groups of experts, of which a token's experts come from `groups_per_token`.
        groups_per_token: as many as there are groups where the choice is free.
        routing_scale: by which the weights of a token's experts are multiplied.
        normalised_routing: whether the weights of a token's experts add up to one, before the scale.
        sparse: for each layer, whether its MLP is a mixture of experts.
        latent: of latent attention; None for attention with grouped queries.
        delta: of gated delta nets; None where all layers have attention.
        output_gate: True if a sigmoid of the token scales the output of attention, element by element.
        centred_norms: True if norms multiply by one plus their weight, those of gated delta nets aside.
    """

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    max_positions: int
    norm_epsilon: float
    initializer_range: float
    tied: bool
    qk_norm: bool = False
    norm_over_heads: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    expert_biases: bool = False
    sinks: bool = False
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    routing_scale: float = 1.0
    normalised_routing: bool = False
    sparse: tuple[bool, ...] = ()
    latent: Latent | None = None
    delta: Delta | None = None
    output_gate: bool = False
    centred_norms: bool = False

    @property
    def value_dim(self) -> int:
        """Elements of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def from_latent(self) -> int:
        """Elements of a token's keys and values over all heads that are made from its latent; 0 without latents."""
        if self.latent is None:
            return 0
        return self.heads * (self.head_dim - self.latent.rotary_dim + self.latent.value_dim)

    @property
    def attention_layers(self) -> int:
        """Layers with attention, whose keys and values engines cache."""
        return self.layers - (sum(self.delta.linear) if self.delta else 0)

    def is_sparse(self, layer: int) -> bool:
        return bool(self.sparse) and self.sparse[layer]

    def is_linear(self, layer: int) -> bool:
        """True if the layer has a gated delta net in place of attention."""
        return self.delta is not None and self.delta.linear[layer]


def attention_biases(config: HFConfig) -> dict[str, bool]:
    """The biases of attention where `attention_bias` gives all four projections one."""
    return dict.fromkeys(("qkv_bias", "output_bias"), config.flag("attention_bias"))


def divided_head_dim(config: HFConfig) -> int | None:
    """Elements of a head where `head_dim` is absent and the architecture has no number of its own.

    None where the config has a `head_dim`.

    Raises:
        UserError: the heads do not divide the hidden size.
    """
    if config.get("head_dim") is not None:
        return None
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden % heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}, or head_dim beside it")
    return hidden // heads


def common_head_dim(config: HFConfig, *, nullable: bool = False) -> int:
    """Elements of a head where SGLang's class has no others than hidden_size / num_attention_heads.

    Raises:
        UserError: the heads do not divide the hidden size, or `head_dim` differs; null too unless `nullable`.
    """
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden % heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={heads}")
    divided = hidden // heads
    if config.integer("head_dim", divided, null=divided if nullable else None) != divided:
        raise config.error("head_dim", f"hidden_size / num_attention_heads = {divided}")
    return divided


def local_experts(config: HFConfig, experts: int, experts_per_token: int) -> tuple[int, int]:
    """Experts, and experts of a token, of a family whose weights are the softmax over a token's experts alone.

    Args:
        config: of the model.
        experts: count where the config has none.
        experts_per_token: likewise.

    Raises:
        UserError: a token has one expert, whose weight would be 1 for every token, or more than there are.
    """
    experts = config.integer("num_local_experts", experts)
    experts_per_token = config.integer("num_experts_per_tok", experts_per_token)
    if not 2 <= experts_per_token <= experts:
        raise config.error("num_experts_per_tok", f"between 2 and num_local_experts={experts}")
    return experts, experts_per_token


def dense_sizes(config: HFConfig, *, groups: int, head_dim: int, **switches: Any) -> Sizes:
    """The sizes that every decoder with grouped-query attention and gated MLPs has.

    Args:
        config: the HuggingFace config.
        groups: key and value heads, and `head_dim`: as the architecture reads them where they are absent or null.
        head_dim: elements of a head.
        switches: the other fields of `Sizes`.

    Raises:
        UserError: a size is missing, of the wrong type, or does not divide another that it must; or an option is set
            that this project's layers do not have.
    """
    heads = config.integer("num_attention_heads")
    if heads % groups:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head_dim % 2:
        raise config.error("head_dim", "an even number, for rotary embeddings")
    return decoder_sizes(config, heads=heads, groups=groups, head_dim=head_dim, **switches)


def decoder_sizes(config: HFConfig, **others: Any) -> Sizes:
    """The sizes that every decoder with gated MLPs has, and `others`. Raises UserError as `dense_sizes` does."""
    config.require("hidden_act", ("silu",), "silu")
    config.require("attention_dropout", (0, 0.0), 0.0)
    config.require("dual_chunk_attention_config", (None,))  # which transformers passes over and SGLang obeys
    config.require("use_sliding_window", (False,), False)
    kinds = set(config.texts("layer_types"))
    if not others.keys() & {"windowed", "delta"} and kinds - {"full_attention"}:
        raise config.error("layer_types", 'only "full_attention"')
    common: dict[str, Any] = {
        "layers": config.integer("num_hidden_layers"),
        "hidden": config.integer("hidden_size"),
        "vocabulary": config.integer("vocab_size"),
        "ffn": others["ffn"] if "ffn" in others else config.integer("intermediate_size"),
        "max_positions": config.integer("max_position_embeddings"),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6, most=1.0),
        "initializer_range": config.number("initializer_range", 0.02),
        "tied": config.flag("tie_word_embeddings"),
    }
    return Sizes(**common | others)
