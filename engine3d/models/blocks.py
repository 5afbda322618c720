"""The rules that model families share: embedding and head, attention, gated MLP, routed and shared experts.

In names, `{layer}` is the layer's number in the HuggingFace model on one side and in the pipeline stage on the other,
and `{expert}` the expert's number in the HuggingFace model on one side and on the rank on the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from engine3d.models.rules import (
    ColumnParallel,
    ExpertRows,
    GateUp,
    HeadRows,
    HFTensor,
    QueryGroups,
    Replicated,
    RowParallel,
    Rule,
    Sections,
    Vocabulary,
)
from engine3d.models.sizes import Delta, Latent, Sizes

MEGATRON = "decoder.layers.{layer}."
MTP = "mtp."
HF = "model.layers.{layer}."
DELTA_NET = HF + "linear_attn."
EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


def embedding(sizes: Sizes) -> tuple[Rule, ...]:
    return (Rule("embedding.word_embeddings.weight", Vocabulary(_embedding_tensor(sizes))),)


def head(sizes: Sizes, value_head: bool, value_bias: bool) -> tuple[Rule, ...]:
    """Final norm and output layer: over the vocabulary, tied to the embedding, or one value a token."""
    final_norm = norm("decoder.final_layernorm.weight", "model.norm.weight", sizes.hidden, centred=sizes.centred_norms)
    if value_head:
        score = HFTensor("score.weight", (1, sizes.hidden), "zeros", optional=True)
        output = Rule("output_layer.weight", Replicated(score))
        if value_bias:
            return (final_norm, output, Rule("output_layer.bias", Replicated(HFTensor("score.bias", (1,), "zeros"))))
    elif sizes.tied:
        output = Rule("output_layer.weight", Vocabulary(_embedding_tensor(sizes)), shared=True)
    else:
        output = Rule("output_layer.weight", Vocabulary(HFTensor(OUTPUT_LAYER, (sizes.vocabulary, sizes.hidden))))
    return (final_norm, output)


def layer_norms(sizes: Sizes, sparse: bool, linear: bool = False) -> tuple[Rule, ...]:
    """The norms before attention and MLP. `linear`: before a gated delta net.

    Transformer Engine puts a norm into the linear layer that follows it, unless it is followed by several.
    """
    first = "in_proj" if linear else "linear_qkv"
    qkv_norm, fc1_norm = f"self_attention.{first}.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    return (
        norm(
            MEGATRON + "input_layernorm.weight",
            HF + "input_layernorm.weight",
            sizes.hidden,
            transformer_engine=None if sizes.latent else MEGATRON + qkv_norm,
            centred=sizes.centred_norms,
        ),
        norm(
            MEGATRON + "pre_mlp_layernorm.weight",
            HF + "post_attention_layernorm.weight",
            sizes.hidden,
            transformer_engine=None if sparse else MEGATRON + fc1_norm,
            centred=sizes.centred_norms,
        ),
    )


def attention(sizes: Sizes) -> tuple[Rule, ...]:
    """Grouped-query attention."""
    megatron, hf = MEGATRON + "self_attention.", HF + "self_attn."
    queries, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    rules = [
        Rule(
            megatron + "linear_qkv.weight",
            QueryGroups(
                HFTensor(hf + "q_proj.weight", (queries * (1 + sizes.output_gate), sizes.hidden), fp8=True),
                HFTensor(hf + "k_proj.weight", (keys, sizes.hidden), fp8=True),
                HFTensor(hf + "v_proj.weight", (keys, sizes.hidden), fp8=True),
                sizes.groups,
                sizes.output_gate,
            ),
        ),
        Rule(
            megatron + "linear_proj.weight",
            RowParallel(HFTensor(hf + "o_proj.weight", (sizes.hidden, queries), fp8=True)),
        ),
    ]
    if sizes.qkv_bias:
        biases = QueryGroups(
            HFTensor(hf + "q_proj.bias", (queries,), "zeros"),
            HFTensor(hf + "k_proj.bias", (keys,), "zeros"),
            HFTensor(hf + "v_proj.bias", (keys,), "zeros"),
            sizes.groups,
        )
        rules.append(Rule(megatron + "linear_qkv.bias", biases))
    if sizes.output_bias:
        replicated = Replicated(HFTensor(hf + "o_proj.bias", (sizes.hidden,), "zeros"))
        rules.append(Rule(megatron + "linear_proj.bias", replicated))
    if sizes.sinks:
        sinks = ColumnParallel(HFTensor(hf + "sinks", (sizes.heads,)))
        rules.append(Rule(megatron + "core_attention.softmax_offset", sinks))
    if sizes.norm_over_heads:
        for name, hf_name, length in (("query_norm", "q_norm", queries), ("key_norm", "k_norm", keys)):
            weight = HFTensor(f"{hf}{hf_name}.weight", (length,), "ones")
            rules.append(Rule(f"{megatron}{name}.weight", ColumnParallel(weight)))
    elif sizes.qk_norm:
        for name in ("q", "k"):
            hf_name, centred = f"{hf}{name}_norm.weight", sizes.centred_norms
            rules.append(norm(f"{megatron}{name}_layernorm.weight", hf_name, sizes.head_dim, centred=centred))
    return tuple(rules)


def delta_net(sizes: Sizes, delta: Delta, projections: tuple[HeadRows, ...]) -> tuple[Rule, ...]:
    """A gated delta net.

    Args:
        sizes: of the model.
        delta: of the layer.
        projections: rows of its first linear layer: queries, keys, values, output gate, beta and decay.
    """
    megatron, hf = MEGATRON + "self_attention.", DELTA_NET
    convolution = HFTensor(hf + "conv1d.weight", (2 * delta.keys + delta.values, 1, delta.kernel))
    convolved = (
        HeadRows(convolution, delta.key_heads, delta.key_dim),
        HeadRows(convolution, delta.key_heads, delta.key_dim, delta.keys),
        HeadRows(convolution, delta.value_heads, delta.value_dim, 2 * delta.keys),
    )
    out = HFTensor(hf + "out_proj.weight", (sizes.hidden, delta.values))
    return (
        Rule(megatron + "in_proj.weight", Sections(projections)),
        Rule(megatron + "conv1d.weight", Sections(convolved)),
        Rule(megatron + "dt_bias", ColumnParallel(HFTensor(hf + "dt_bias", (delta.value_heads,), "ones"))),
        Rule(megatron + "A_log", ColumnParallel(HFTensor(hf + "A_log", (delta.value_heads,), "zeros"))),
        norm(megatron + "out_norm.weight", hf + "norm.weight", delta.value_dim),
        Rule(megatron + "out_proj.weight", RowParallel(out)),
    )


def latent_attention(sizes: Sizes, latent: Latent) -> tuple[Rule, ...]:
    """Multi-head latent attention.

    The projections to the latent elements, whose norm needs all of them, are complete on every rank with Transformer
    Engine. Megatron-Core's own layers cut their rows and gather the outputs.
    """
    megatron, hf = MEGATRON + "self_attention.", HF + "self_attn."
    queries, values = sizes.heads * sizes.head_dim, sizes.heads * sizes.value_dim

    def down(name: str, hf_name: str, rows: int) -> Rule:
        tensor = HFTensor(f"{hf}{hf_name}.weight", (rows, sizes.hidden), fp8=True)
        return Rule(f"{megatron}{name}.weight", ColumnParallel(tensor), transformer_engine_cut=Replicated(tensor))

    def up(name: str, hf_name: str, rows: int, columns: int, fp8: bool = True) -> Rule:
        tensor = HFTensor(f"{hf}{hf_name}.weight", (rows, columns), fp8=fp8)
        return Rule(f"{megatron}{name}.weight", ColumnParallel(tensor))

    def latent_norm(name: str, hf_name: str, length: int, linear: str) -> Rule:
        fused = f"{megatron}{linear}.layer_norm_weight"
        return norm(f"{megatron}{name}.weight", f"{hf}{hf_name}.weight", length, transformer_engine=fused)

    if latent.query_rank is None:
        query_rules: tuple[Rule, ...] = (up("linear_q_proj", "q_proj", queries, sizes.hidden),)
    else:
        query_rules = (
            down("linear_q_down_proj", "q_a_proj", latent.query_rank),
            latent_norm("q_layernorm", "q_a_layernorm", latent.query_rank, "linear_q_up_proj"),
            up("linear_q_up_proj", "q_b_proj", queries, latent.query_rank),
        )
    return (
        *query_rules,
        down("linear_kv_down_proj", "kv_a_proj_with_mqa", latent.key_value_rank + latent.rotary_dim),
        latent_norm("kv_layernorm", "kv_a_layernorm", latent.key_value_rank, "linear_kv_up_proj"),
        up("linear_kv_up_proj", "kv_b_proj", sizes.from_latent, latent.key_value_rank, fp8=False),
        Rule(
            megatron + "linear_proj.weight",
            RowParallel(HFTensor(hf + "o_proj.weight", (sizes.hidden, values), fp8=True)),
        ),
    )


def dense_mlp(sizes: Sizes) -> tuple[Rule, ...]:
    """A gated MLP."""
    megatron, hf = MEGATRON + "mlp.", HF + "mlp."
    rules = list(_gated(megatron + "linear_fc1.weight", megatron + "linear_fc2.weight", hf, sizes.hidden, sizes.ffn))
    if sizes.mlp_bias:
        gate = HFTensor(hf + "gate_proj.bias", (sizes.ffn,), "zeros")
        up = HFTensor(hf + "up_proj.bias", (sizes.ffn,), "zeros")
        rules.append(Rule(megatron + "linear_fc1.bias", GateUp(gate, up)))
        down = HFTensor(hf + "down_proj.bias", (sizes.hidden,), "zeros")
        rules.append(Rule(megatron + "linear_fc2.bias", Replicated(down)))
    return tuple(rules)


def routed_experts(
    sizes: Sizes, name: str = "mlp", linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, ...]:
    """A router and its experts, each a gated MLP.

    Args:
        sizes: of the model.
        name: of the layer's experts in the HuggingFace model.
        linears: names of an expert's three linear layers there.
    """
    megatron, hf = MEGATRON + "mlp.", f"{HF}{name}."
    router = ExpertRows(HFTensor(hf + "gate.weight", (sizes.experts, sizes.hidden)))
    return (
        Rule(megatron + "router.weight", router),
        *_gated(
            megatron + "experts.local_experts.{expert}.linear_fc1.weight",
            megatron + "experts.local_experts.{expert}.linear_fc2.weight",
            hf + "experts.{expert}.",
            sizes.hidden,
            sizes.expert_ffn,
            fc1_transformer_engine=megatron + "experts.linear_fc1.weight{expert}",
            fc2_transformer_engine=megatron + "experts.linear_fc2.weight{expert}",
            linears=linears,
        ),
    )


def stacked_experts(sizes: Sizes) -> tuple[Rule, ...]:
    """A router and its experts with biases, which files have as tensors of all experts.

    Rows of an expert's first layer are those of gate and up in turn.
    """
    megatron, hf = MEGATRON + "mlp.", HF + "mlp."
    experts, hidden, ffn = sizes.experts, sizes.hidden, sizes.expert_ffn

    def of_expert(name: str, hf_name: str, shape: tuple[int, ...], cut: type[ColumnParallel | Replicated]) -> Rule:
        init: Literal["normal", "zeros"] = "normal" if len(shape) == 2 else "zeros"
        tensor = HFTensor(f"{hf}experts.{hf_name}", shape, init, stacked=experts)
        linear, kind = name.split(".")
        fused = f"{megatron}experts.{linear}.{kind}{{expert}}"
        return Rule(f"{megatron}experts.local_experts.{{expert}}.{name}", cut(tensor), fused)

    return (
        Rule(megatron + "router.weight", ExpertRows(HFTensor(hf + "router.weight", (experts, hidden)))),
        Rule(megatron + "router.bias", ExpertRows(HFTensor(hf + "router.bias", (experts,)))),
        of_expert("linear_fc1.weight", "gate_up_proj", (2 * ffn, hidden), ColumnParallel),
        of_expert("linear_fc1.bias", "gate_up_proj_bias", (2 * ffn,), ColumnParallel),
        of_expert("linear_fc2.weight", "down_proj", (hidden, ffn), RowParallel),
        of_expert("linear_fc2.bias", "down_proj_bias", (hidden,), Replicated),
    )


def expert_bias(sizes: Sizes, name: str = "mlp.gate.e_score_correction_bias") -> tuple[Rule, ...]:
    """Expert bias (auxiliary-loss-free load balancing), added to the scores that choose experts alone.

    Args:
        sizes: of the model.
        name: of the bias in a layer of the HuggingFace model.
    """
    bias = HFTensor(HF + name, (sizes.experts,), buffer=True)
    return (Rule(MEGATRON + "mlp.router.expert_bias", ExpertRows(bias)),)


def shared_expert(sizes: Sizes, name: str = "shared_experts") -> tuple[Rule, ...]:
    """A gated MLP next to the routed experts, cut over tp as a dense one. `name`: its name in the HuggingFace model.

    Where a gate of the token scales its output, the gate is complete on every rank.
    """
    megatron, hf = MEGATRON + "mlp.shared_experts.", HF + "mlp."
    fc1, fc2 = megatron + "linear_fc1.weight", megatron + "linear_fc2.weight"
    rules = _gated(fc1, fc2, f"{hf}{name}.", sizes.hidden, sizes.shared_ffn)
    if not sizes.shared_gate:
        return rules
    gate = HFTensor(f"{hf}{name}_gate.weight", (1, sizes.hidden))
    return (*rules, Rule(megatron + "gate_weight", Replicated(gate)))


def multi_token(sizes: Sizes, layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A layer for multi-token prediction: a projection of a token's embedding and a hidden state, and a decoder layer.

    Args:
        sizes: of the model.
        layer: the rules of the model's last layer, which the decoder layer is like.
    """
    hidden, inner = sizes.hidden, MTP + "mtp_model_layer."

    def renamed(name: str | None) -> str | None:
        return None if name is None else name.replace(MEGATRON, inner)

    projection = HFTensor(HF + "eh_proj.weight", (hidden, 2 * hidden))
    return (
        norm(MTP + "enorm.weight", HF + "enorm.weight", hidden),
        norm(MTP + "hnorm.weight", HF + "hnorm.weight", hidden),
        Rule(MTP + "eh_proj.weight", ColumnParallel(projection)),
        *(
            replace(rule, name=rule.name.replace(MEGATRON, inner), transformer_engine=renamed(rule.transformer_engine))
            for rule in layer
        ),
        norm(MTP + "final_layernorm.weight", HF + "shared_head.norm.weight", hidden),
    )


def norm(name: str, hf_name: str, length: int, transformer_engine: str | None = None, *, centred: bool = False) -> Rule:
    """An RMSNorm. `centred`: it multiplies by one plus its weight."""
    return Rule(name, Replicated(HFTensor(hf_name, (length,), "zeros" if centred else "ones")), transformer_engine)


def _gated(
    fc1: str,
    fc2: str,
    hf: str,
    hidden: int,
    ffn: int,
    fc1_transformer_engine: str | None = None,
    fc2_transformer_engine: str | None = None,
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, ...]:
    gate, up, down_name = (f"{hf}{linear}.weight" for linear in linears)
    gate_up = GateUp(HFTensor(gate, (ffn, hidden), fp8=True), HFTensor(up, (ffn, hidden), fp8=True))
    down = RowParallel(HFTensor(down_name, (hidden, ffn), fp8=True))
    return (Rule(fc1, gate_up, fc1_transformer_engine), Rule(fc2, down, fc2_transformer_engine))


def _embedding_tensor(sizes: Sizes) -> HFTensor:
    return HFTensor(EMBEDDING, (sizes.vocabulary, sizes.hidden))
