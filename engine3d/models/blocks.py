"""The rules that model families share: embedding and head, attention, gated MLP, routed and shared experts.

In names, `{layer}` is the layer's number in the HuggingFace model on one side and in the pipeline stage on the other,
and `{expert}` the expert's number in the HuggingFace model on one side and on the rank on the other.
"""

from __future__ import annotations

from engine3d.models.rules import (
    ColumnParallel,
    ExpertRows,
    GateUp,
    HFTensor,
    QueryGroups,
    Replicated,
    RowParallel,
    Rule,
    Vocabulary,
)
from engine3d.models.sizes import Latent, Sizes

MEGATRON = "decoder.layers.{layer}."
HF = "model.layers.{layer}."
EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


def embedding(sizes: Sizes) -> tuple[Rule, ...]:
    return (Rule("embedding.word_embeddings.weight", Vocabulary(_embedding_tensor(sizes))),)


def head(sizes: Sizes, value_head: bool, value_bias: bool) -> tuple[Rule, ...]:
    """Final norm and output layer: over the vocabulary, tied to the embedding, or one value a token."""
    final_norm = norm("decoder.final_layernorm.weight", "model.norm.weight", sizes.hidden)
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


def layer_norms(sizes: Sizes, sparse: bool) -> tuple[Rule, ...]:
    """The norms before attention and MLP.

    Transformer Engine puts a norm into the linear layer that follows it, unless it is followed by several.
    """
    qkv_norm, fc1_norm = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    return (
        norm(
            MEGATRON + "input_layernorm.weight",
            HF + "input_layernorm.weight",
            sizes.hidden,
            transformer_engine=None if sizes.latent else MEGATRON + qkv_norm,
        ),
        norm(
            MEGATRON + "pre_mlp_layernorm.weight",
            HF + "post_attention_layernorm.weight",
            sizes.hidden,
            transformer_engine=None if sparse else MEGATRON + fc1_norm,
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
                HFTensor(hf + "q_proj.weight", (queries, sizes.hidden), fp8=True),
                HFTensor(hf + "k_proj.weight", (keys, sizes.hidden), fp8=True),
                HFTensor(hf + "v_proj.weight", (keys, sizes.hidden), fp8=True),
                sizes.groups,
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
    if sizes.norm_over_heads:
        for name, hf_name, length in (("query_norm", "q_norm", queries), ("key_norm", "k_norm", keys)):
            weight = HFTensor(f"{hf}{hf_name}.weight", (length,), "ones")
            rules.append(Rule(f"{megatron}{name}.weight", ColumnParallel(weight)))
    elif sizes.qk_norm:
        rules.append(norm(megatron + "q_layernorm.weight", hf + "q_norm.weight", sizes.head_dim))
        rules.append(norm(megatron + "k_layernorm.weight", hf + "k_norm.weight", sizes.head_dim))
    return tuple(rules)


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


def norm(name: str, hf_name: str, length: int, transformer_engine: str | None = None) -> Rule:
    return Rule(name, Replicated(HFTensor(hf_name, (length,), "ones")), transformer_engine)


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
