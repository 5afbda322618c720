"""Small models of every family, with every option that changes their weights or their arithmetic."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine3d.layout import Layout

_COMMON: dict[str, Any] = {
    "vocab_size": 97,  # no tp size divides it: the vocabulary is padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GLM_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}


def _config(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_COMMON, **options}


_QWEN3_5: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}


def _beside_tower(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    """A language model next to a vision tower."""
    text = {key: value for key, value in (_COMMON | options).items() if key in options or key != "intermediate_size"}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"model_type": f"{model_type}_text", **text},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 4,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 16,
        },
    }


MOE = _config("Qwen3MoeForCausalLM", "qwen3_moe", **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1])
DEEPSEEK = _config(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    num_key_value_heads=4,
    head_dim=8,
    # transformers has this one fixed in the norms of the latent elements.
    rms_norm_eps=1e-6,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=24,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rope_scaling={
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 32,
    },
)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "qwen3_moe-biases": _config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **_EXPERTS,
        norm_topk_prob=False,
        attention_bias=True,
        decoder_sparse_step=2,
        rope_theta=500.0,
    ),
    "qwen2-tied": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        tie_word_embeddings=True,
        rope_theta=500.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "qwen2_moe": _config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        **_EXPERTS,
        head_dim=8,
        num_key_value_heads=4,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "mistral": _config("MistralForCausalLM", "mistral", sliding_window=None, rope_theta=500.0),
    "mixtral": _config(
        "MixtralForCausalLM", "mixtral", head_dim=8, num_local_experts=8, num_experts_per_tok=2, rope_theta=500.0
    ),
    "glm4_moe": _config(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **_GLM_EXPERTS,
        use_qk_norm=True,
        attention_bias=True,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
    ),
    "minimax_m2": _config(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        head_dim=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        rotary_dim=4,
        partial_rotary_factor=0.5,
        scoring_func="sigmoid",
        use_qk_norm=True,
        use_routing_bias=True,
    ),
    "gpt_oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=6,  # shorter than the tests' sequences
        swiglu_limit=7.0,
        rope_scaling={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    ),
    "qwen3_next": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **_EXPERTS,
        norm_topk_prob=True,
        shared_expert_intermediate_size=40,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        rope_theta=500.0,
    ),
    "qwen3_5_moe": _beside_tower(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        **_EXPERTS,
        **_QWEN3_5,
        shared_expert_intermediate_size=40,
        full_attention_interval=4,
    ),
    "qwen3_5-tied": _beside_tower(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", **_QWEN3_5, intermediate_size=48, tie_word_embeddings=True
    ),
    "qwen3-tied": _config("Qwen3ForCausalLM", "qwen3", tie_word_embeddings=True),
    "qwen3-biases": _config(
        "Qwen3ForCausalLM",
        "qwen3",
        attention_bias=True,
        num_key_value_heads=4,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "llama": _config("LlamaForCausalLM", "llama", head_dim=8, num_key_value_heads=1),
    "llama-biases": _config(
        "LlamaForCausalLM",
        "llama",
        attention_bias=True,
        mlp_bias=True,
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-queries": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
        # Of these three, which published configs have, transformers knows nothing.
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "llama-linear": _config("LlamaForCausalLM", "llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
}

_BLOCKS: dict[str, Any] = {
    "hidden_size": 192,  # the last blocks have 64 columns
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "moe_intermediate_size": 256,
}
FP8_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {**CONFIGS["qwen2-tied"], **_BLOCKS, "num_key_value_heads": 2},
    "qwen3": {**CONFIGS["qwen3-biases"], **_BLOCKS, "num_key_value_heads": 2},
    "qwen3_moe": {**MOE, **_BLOCKS, "num_experts": 4},
    "deepseek_v3": {
        **DEEPSEEK,
        **_BLOCKS,
        "q_lora_rank": 256,
        "kv_lora_rank": 192,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 64,
        "n_shared_experts": 1,
    },
    "qwen2_moe": {
        **CONFIGS["qwen2_moe"],
        **_BLOCKS,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 256,
    },
    "mixtral": {
        **CONFIGS["mixtral"],
        **_BLOCKS,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "glm4_moe": {**CONFIGS["glm4_moe"], **_BLOCKS, "num_key_value_heads": 2},
}
"""Models whose matrices have several blocks of 128 x 128, so that two ranks cut them between blocks."""
BLOCK_CONFIGS: dict[str, dict[str, Any]] = {
    **{
        f"{name}-blocks": {**CONFIGS[name], **_BLOCKS, "num_key_value_heads": 2}
        for name in ("llama", "mistral", "qwen2-tied", "qwen3_moe")
    },
    **{f"{name}-blocks": FP8_CONFIGS[name] for name in ("qwen2_moe", "mixtral", "glm4_moe")},
    "qwen3-biases-blocks": {**FP8_CONFIGS["qwen3"], "num_hidden_layers": 4},
}
"""Models that may train in fp8: blocks of parameters are those of tensors."""


def family_of(name: str) -> str:
    """Family of a model."""
    return str((CONFIGS | BLOCK_CONFIGS)[name]["model_type"])


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model's language model."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with other values of its language model."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


def has_experts(name: str) -> bool:
    return not {"num_experts", "num_local_experts", "n_routed_experts"}.isdisjoint(text_of(CONFIGS[name]))


def has_delta_nets(name: str) -> bool:
    return "linear_num_key_heads" in text_of((CONFIGS | BLOCK_CONFIGS)[name])


def may_cut(name: str, layout: Layout) -> bool:
    """True if a layout cuts no experts that the model does not have, none with biases, and has not too many ranks."""
    key_heads = text_of((CONFIGS | BLOCK_CONFIGS)[name]).get("linear_num_key_heads", 0)
    if key_heads % (layout.tp * layout.cp):
        return False
    if not has_experts(name):
        return layout.ep * layout.etp == 1
    return family_of(name) != "gpt_oss" or layout.etp == 1


def make(
    name: str, directory: Path, *, value_head: bool = False, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Any:
    """Write a transformers model with random fp32 weights, norms, biases and buffers too; return it.

    `changes` are values of its language model's config.
    """
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    given = changed((CONFIGS | BLOCK_CONFIGS)[name], **(changes or {}))
    options = {key: value for key, value in given.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(given["model_type"], **options)
    torch.manual_seed(sum(name.encode()) + seed)
    if value_head:
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    else:
        classes = AutoModelForImageTextToText if "text_config" in given else AutoModelForCausalLM
        model = classes.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2)
            centred = has_delta_nets(name) and "linear_attn" not in parameter_name
            if "norm" in parameter_name and not centred:
                parameter.add_(1.0)
            if parameter_name.endswith("gate_up_proj_bias"):
                parameter.mul_(30.0)  # beyond the limits of gpt-oss's SwiGLU
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    # Two shards, so that the index is read too.
    model.float().eval().save_pretrained(directory, max_shard_size="100KB")
    return model


def add_drafting_layer(directory: Path, *, follows_token: bool = False) -> None:
    """Give a model's files a complete layer for multi-token prediction: its last layer, and a random projection.

    Args:
        directory: of the model, with its layers numbered.
        follows_token: True to make the model's logits, and those of the layer, a function of the last token alone. They
            are the same function: the layer drafts what is most likely.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, drafting = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored = load_file(file)
        for name, values in stored.items():
            if follows_token and (name.endswith(("o_proj.weight", "down_proj.weight"))):
                values.zero_()
            if follows_token and name == "model.norm.weight":
                values.fill_(1.0)
            if name.startswith(last):
                tensors[name.replace(last, drafting)] = values.clone()
        save_file(stored, file, metadata={"format": "pt"})
    projection = torch.eye(hidden, 2 * hidden) if follows_token else torch.randn(hidden, 2 * hidden) * 0.2
    tensors |= {f"{drafting}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{drafting}eh_proj.weight"] = projection
    save_file(tensors, directory / "multi_token.safetensors", metadata={"format": "pt"})
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "multi_token.safetensors")
    index_file.write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def add_multi_token_layer(directory: Path) -> None:
    """Give a model's files a layer for multi-token prediction as they have it: some of its tensors, in two dtypes."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "config.json").read_text())
    text = text_of(config)
    hidden = text["hidden_size"]
    named = "linear_num_key_heads" in text
    layer = "mtp.layers.0." if named else f"model.layers.{text['num_hidden_layers']}."
    if not layer.startswith("mtp."):
        (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = {
        f"{layer}eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16(),
        f"{layer}enorm.weight": torch.randn(hidden).bfloat16(),
        f"{layer}mlp.gate.e_score_correction_bias": torch.randn(4),
    }
    index_file = directory / "model.safetensors.index.json"
    if not index_file.exists():
        file = directory / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
        return
    save_file(tensors, directory / "multi_token.safetensors", metadata={"format": "pt"})
    index = json.loads(index_file.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "multi_token.safetensors")
    index_file.write_text(json.dumps(index))
