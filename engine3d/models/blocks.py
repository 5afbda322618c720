"""The rules that model families share: embedding and head, grouped-query attention, gated MLP, routed experts.

In names, `{layer}` is the layer's number in the HuggingFace model on one side and in the pipeline stage on the other,
and `{expert}` the expert's number in the HuggingFace model on one side and on the rank on the other.
"""

from __future__ import annotations

from engine3d.models.rules import (
    ExpertRows,
    GateUp,
    HFTensor,
    QueryGroups,
    Replicated,
    Row,
    Rule,
    Vocabulary,
)
from engine3d.models.sizes import Sizes

MEGATRON = "decoder.layers.{layer}."
HF = "model.layers.{layer}."


def embedding(sizes: Sizes) -> tuple[Rule, ...]:
    return (Rule("embedding.word_embeddings.weight", Vocabulary(_embedding_tensor(sizes))),)


def head(sizes: Sizes, value_head: bool) -> tuple[Rule, ...]:
    """Final norm and output layer: over the vocabulary, tied to the embedding, or one value a token."""
    final_norm = norm("decoder.final_layernorm.weight", "model.norm.weight", sizes.hidden)
    if value_head:
        score = HFTensor("score.weight", (1, sizes.hidden), "zeros", optional=True)
        output = Rule("output_layer.weight", Replicated(score))
    elif sizes.tied:
        output = Rule("output_layer.weight", Vocabulary(_embedding_tensor(sizes)), shared=True)
    else:
        output = Rule("output_layer.weight", Vocabulary(HFTensor("lm_head.weight", (sizes.vocabulary, sizes.hidden))))
    return (final_norm, output)


def layer_norms(sizes: Sizes, sparse: bool) -> tuple[Rule, ...]:
    """The norms before attention and MLP. Transformer Engine puts a norm into the linear layer that follows it."""
    qkv_norm, fc1_norm = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    return (
        norm(
            MEGATRON + "input_layernorm.weight",
            HF + "input_layernorm.weight",
            sizes.hidden,
            transformer_engine=MEGATRON + qkv_norm,
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
                HFTensor(hf + "q_proj.weight", (queries, sizes.hidden)),
                HFTensor(hf + "k_proj.weight", (keys, sizes.hidden)),
                HFTensor(hf + "v_proj.weight", (keys, sizes.hidden)),
                sizes.groups,
            ),
        ),
        Rule(megatron + "linear_proj.weight", Row(HFTensor(hf + "o_proj.weight", (sizes.hidden, queries)))),
    ]
    if sizes.attention_bias:
        biases = QueryGroups(
            HFTensor(hf + "q_proj.bias", (queries,), "zeros"),
            HFTensor(hf + "k_proj.bias", (keys,), "zeros"),
            HFTensor(hf + "v_proj.bias", (keys,), "zeros"),
            sizes.groups,
        )
        rules.append(Rule(megatron + "linear_qkv.bias", biases))
        whole = Replicated(HFTensor(hf + "o_proj.bias", (sizes.hidden,), "zeros"))
        rules.append(Rule(megatron + "linear_proj.bias", whole))
    if sizes.qk_norm:
        rules.append(norm(megatron + "q_layernorm.weight", hf + "q_norm.weight", sizes.head_dim))
        rules.append(norm(megatron + "k_layernorm.weight", hf + "k_norm.weight", sizes.head_dim))
    return tuple(rules)


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


def routed_experts(sizes: Sizes) -> tuple[Rule, ...]:
    """A router and its experts, each a gated MLP."""
    megatron, hf = MEGATRON + "mlp.", HF + "mlp."
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
        ),
    )


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
) -> tuple[Rule, ...]:
    gate_up = GateUp(HFTensor(hf + "gate_proj.weight", (ffn, hidden)), HFTensor(hf + "up_proj.weight", (ffn, hidden)))
    down = Row(HFTensor(hf + "down_proj.weight", (hidden, ffn)))
    return (Rule(fc1, gate_up, fc1_transformer_engine), Rule(fc2, down, fc2_transformer_engine))


def _embedding_tensor(sizes: Sizes) -> HFTensor:
    return HFTensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
