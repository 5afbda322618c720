"""Configs of published models, and others that resemble a family: read with the right sizes, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine3d.errors import UserError
from engine3d.models import FAMILIES, model_spec
from engine3d.rollout import RolloutConfig
from engine3d.rollout.served import check_served
from tests.support.tiny_families import CONFIGS, changed, text_of


def config_of(
    architecture: str, model_type: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **others,
    }


def qwen2(*sizes: int, vocabulary: int, tied: bool = False, **others: Any) -> dict[str, Any]:
    return config_of(
        "Qwen2ForCausalLM",
        "qwen2",
        *sizes,
        **{
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": sizes[0],
            **others,
        },
    )


def qwen2_moe(*sizes: int, **others: Any) -> dict[str, Any]:
    return config_of(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        *sizes,
        **{
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            **others,
        },
    )


def llama(*sizes: int, scaling: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    return config_of(
        "LlamaForCausalLM",
        "llama",
        *sizes,
        **{
            "vocab_size": 128256,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 131072,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": scaling,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            **others,
        },
    )


def llama3(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def mistral(model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    architecture = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}[model_type]
    return config_of(
        architecture,
        model_type,
        *sizes,
        **{"vocab_size": 32000, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, **others},
    )


def glm(*sizes: int, **others: Any) -> dict[str, Any]:
    return config_of(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        *sizes,
        **{
            "vocab_size": 151552,
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "topk_group": 1,
            **others,
        },
    )


MINIMAX = config_of(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    *(62, 3072, 1536, 48, 8),
    attn_type_list=[1] * 62,
    head_dim=128,
    max_position_embeddings=196608,
    num_experts_per_tok=8,
    num_local_experts=256,
    qk_norm_type="per_layer",
    rms_norm_eps=1e-06,
    rope_theta=5000000,
    rotary_dim=64,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    tie_word_embeddings=False,
    use_qk_norm=True,
    use_routing_bias=True,
    vocab_size=200064,
)


def gpt_oss(layers: int, experts: int, **others: Any) -> dict[str, Any]:
    return config_of(
        "GptOssForCausalLM",
        "gpt_oss",
        *(layers, 2880, 2880, 64, 8),
        **{
            "attention_bias": True,
            "experts_per_token": 4,
            "head_dim": 64,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_local_experts": experts,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
            **others,
        },
    )


QWEN3_NEXT = config_of(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    *(48, 2048, 5120, 16, 2),
    attention_bias=False,
    decoder_sparse_step=1,
    full_attention_interval=4,
    head_dim=256,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_experts=512,
    num_experts_per_tok=10,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_theta=10000000,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=151936,
)


def qwen3_5(kind: str, *, vocabulary: int = 248320, tied: bool = False, **text: Any) -> dict[str, Any]:
    """A language model next to a vision tower. `kind`: "" or "Moe"."""
    model_type = "qwen3_5_moe" if kind else "qwen3_5"
    return {
        "architectures": [f"Qwen3_5{kind}ForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": 248056,
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": f"{model_type}_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": tied,
            "vocab_size": vocabulary,
            **text,
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": model_type},
    }


QWEN3_5_MOE = qwen3_5(
    "Moe",
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
)
QWEN3_5 = qwen3_5(
    "", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
MIXTRAL: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (qwen2(24, 896, 4864, 14, 2, vocabulary=151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (qwen2(28, 3584, 18944, 28, 4, vocabulary=152064), 7_615_616_512),
    "Qwen2.5-72B": (qwen2(80, 8192, 29568, 64, 8, vocabulary=152064, rms_norm_eps=1e-05), 72_706_203_648),
    "Qwen2.5-Coder-32B": (
        qwen2(64, 5120, 27648, 40, 8, vocabulary=152064, rms_norm_eps=1e-05, rope_scaling=YARN),
        32_763_876_352,
    ),
    "Qwen1.5-MoE-A2.7B": (
        qwen2_moe(
            *(24, 2048, 5632, 16, 16),
            max_position_embeddings=8192,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            sliding_window=32768,
            max_window_layers=21,
        ),
        14_315_784_192,
    ),
    "Qwen2-57B-A14B": (
        qwen2_moe(
            *(28, 3584, 18944, 28, 4),
            max_position_embeddings=131072,
            moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
            num_experts=64,
            num_experts_per_tok=8,
            sliding_window=65536,
            max_window_layers=28,
        ),
        57_408_658_944,
    ),
    "Mixtral-8x7B-v0.1": (
        mistral("mixtral", 32, 4096, 14336, 32, 8, max_position_embeddings=32768, **MIXTRAL),
        46_702_792_704,
    ),
    "Mixtral-8x22B-v0.1": (
        mistral(
            "mixtral", 56, 6144, 16384, 48, 8, **{"max_position_embeddings": 65536, "vocab_size": 32768}, **MIXTRAL
        ),
        140_630_071_296,
    ),
    "Mistral-7B-v0.3": (
        mistral(
            "mistral",
            *(32, 4096, 14336, 32, 8),
            max_position_embeddings=32768,
            vocab_size=32768,
            sliding_window=None,
            rope_theta=1000000.0,
        ),
        7_248_023_552,
    ),
    "GLM-4.5-Air": (
        glm(
            *(46, 4096, 10944, 96, 8),
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            use_qk_norm=False,
        ),
        106_852_245_504,
    ),
    "GLM-4.5": (
        glm(
            *(92, 5120, 12288, 96, 8),
            first_k_dense_replace=3,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
        ),
        352_797_814_784,
    ),
    "MiniMax-M2": (MINIMAX, 228_689_748_992),
    "gpt-oss-20b": (gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": (gpt_oss(36, 128), 116_829_156_672),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296),
    "Qwen3.5-35B-A3B": (QWEN3_5_MOE, 34_660_610_688),
    "Qwen3.5-9B": (QWEN3_5, 8_953_803_264),
    "Llama-3.1-8B": (llama(32, 4096, 14336, 32, 8, scaling=llama3(8.0)), 8_030_261_248),
    "Llama-3.2-1B": (
        llama(16, 2048, 8192, 32, 8, scaling=llama3(32.0), head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Llama-3.3-70B": (llama(80, 8192, 28672, 64, 8, scaling=llama3(8.0)), 70_553_706_496),
}
"""Config of each model, and its parameters."""
MISTRAL_01 = mistral(
    "mistral", 32, 4096, 14336, 32, 8, max_position_embeddings=32768, sliding_window=4096, rope_theta=10000.0
)


_ROPE = CONFIGS["qwen3_5_moe"]["text_config"]["rope_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_served(name: str) -> None:
    config, parameters = PUBLISHED[name]
    spec = model_spec(config)
    assert spec.parameter_count() == parameters
    check_served(spec, RolloutConfig(tp=2))
    assert spec.rope.base == (config.get("rope_theta") or text_of(config)["rope_parameters"]["rope_theta"])
    assert spec.sizes.qkv_bias == name.startswith(("Qwen1", "Qwen2", "GLM", "gpt-oss"))


def of_tiny(name: str, **changes: Any) -> dict[str, Any]:
    return changed(CONFIGS[name], **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL_01, "sliding_window: expected null, or at least max_position_embeddings=32768, found 4096"),
        (
            {key: value for key, value in MISTRAL_01.items() if key != "sliding_window"},
            "sliding_window: expected null, or at least max_position_embeddings=32768, found nothing",
        ),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
            "architecture DeepseekV4ForCausalLM is not supported; supported are "
            + ", ".join(family.architecture for family in FAMILIES),
        ),
        (
            of_tiny("qwen2-tied", use_sliding_window=True, sliding_window=64, max_window_layers=2),
            "use_sliding_window: expected false, found true",
        ),
        (
            of_tiny("qwen2-tied", rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
            'rope_scaling: expected rope_type default, linear, llama3 or yarn, found {"type": "mrope", '
            '"mrope_section": [2, 3, 3]}',
        ),
        (of_tiny("qwen2-tied", attention_bias=False), "attention_bias: expected true, found false"),
        (of_tiny("qwen2-tied", model_type="qwen3"), 'model_type: expected "qwen2", found "qwen3"'),
        (
            of_tiny("qwen2-tied", dual_chunk_attention_config={"chunk_size": 262144}),
            'dual_chunk_attention_config: expected null, found {"chunk_size": 262144}',
        ),
        (of_tiny("qwen2_moe", head_dim=16), "head_dim: expected hidden_size / num_attention_heads = 8, found 16"),
        (
            of_tiny("qwen2_moe", shared_expert_intermediate_size=0),
            "shared_expert_intermediate_size: expected a whole number of at least 1, found 0",
        ),
        (
            of_tiny("glm4_moe", partial_rotary_factor=0.3),
            "partial_rotary_factor=0.3: expected an even number of rotary elements, found 4.8 of head_dim=16",
        ),
        (of_tiny("glm4_moe", partial_rotary_factor=1.5), "partial_rotary_factor: expected at most 1.0"),
        (of_tiny("glm4_moe", scoring_func="softmax"), 'scoring_func: expected "sigmoid", found "softmax"'),
        (of_tiny("qwen2-tied", partial_rotary_factor=0.5), "partial_rotary_factor: expected 1.0, which is the only"),
        (of_tiny("mistral", attention_bias=True), "attention_bias: expected false, found true"),
        (of_tiny("minimax_m2", partial_rotary_factor=0.25), "partial_rotary_factor=0.25: expected 0.5, as rotary_dim"),
        (
            of_tiny("minimax_m2", rotary_dim=8),
            "partial_rotary_factor: expected 1.0, which is the only one supported",
        ),
        (of_tiny("minimax_m2", rotary_dim=10), "rotary_dim: expected an even number of at most head_dim=8, found 10"),
        (of_tiny("minimax_m2", use_qk_norm=False), "use_qk_norm: expected true, found false"),
        (of_tiny("minimax_m2", attn_type_list=[1, 0]), "attn_type_list: expected only 1, attention to all positions"),
        (of_tiny("gpt_oss", swiglu_limit=6.0), "swiglu_limit: expected 7.0, found 6.0"),
        (of_tiny("gpt_oss", attention_bias=False), "attention_bias: expected true, found false"),
        (of_tiny("gpt_oss", rope_scaling=None), "rope_parameters: expected an object with rope_type: transformers and"),
        (
            of_tiny("gpt_oss", layer_types=["full_attention"] * 3),
            'layer_types: expected 4 of "sliding_attention" and "full_attention", the number of layers, found [',
        ),
        (of_tiny("qwen3_next", full_attention_interval=2), "full_attention_interval: expected 4, found 2"),
        (
            of_tiny("qwen3_next", layer_types=["linear_attention", "full_attention"] * 2),
            'layer_types: expected "full_attention" in every fourth layer, "linear_attention" in all others, found [',
        ),
        (of_tiny("qwen3_next", mlp_only_layers=[1]), "mlp_only_layers: expected [], found [1]"),
        (of_tiny("qwen3_next", decoder_sparse_step=2), "decoder_sparse_step: expected 1, found 2"),
        (
            of_tiny("qwen3_next", linear_num_value_heads=6),
            "linear_num_value_heads: expected a multiple of linear_num_key_heads=4, found 6",
        ),
        (of_tiny("qwen3_next", output_gate_type="sigmoid"), 'output_gate_type: expected "silu" or "swish", found "sig'),
        (
            of_tiny("qwen3_5_moe", full_attention_interval=2),
            "text_config: full_attention_interval: expected 4, found 2",
        ),
        (of_tiny("qwen3_5_moe", attn_output_gate=False), "text_config: attn_output_gate: expected true, found false"),
        (of_tiny("qwen3_5_moe", norm_topk_prob=False), "text_config: norm_topk_prob: expected true, found false"),
        (
            of_tiny("qwen3_5_moe", mamba_ssm_dtype="bfloat16"),
            'text_config: mamba_ssm_dtype: expected "float32", found "bfloat16"',
        ),
        (of_tiny("qwen3_5-tied", attention_bias=True), "text_config: attention_bias: expected false, found true"),
        (
            of_tiny("qwen3_5_moe", model_type="qwen3_5_text"),
            'text_config: model_type: expected "qwen3_5_moe_text", found "qwen3_5_text"',
        ),
        (
            of_tiny("qwen3_5-tied", tie_word_embeddings=False),
            "tie_word_embeddings: expected false, as text_config has it, found true",
        ),
        (
            of_tiny("qwen3_5_moe", rope_parameters=None),
            "text_config: rope_parameters: expected an object with rope_theta, found nu",
        ),
        (
            of_tiny("qwen3_5_moe", partial_rotary_factor=0.5),
            "text_config: partial_rotary_factor: expected 0.25, as rope_parameters",
        ),
        (
            of_tiny("qwen3_5_moe", rope_parameters={**_ROPE, "mrope_section": [11, 11, 10]}),
            "text_config: rope_parameters: expected mrope_section of three numbers that add up to half of the rotary",
        ),
        (
            of_tiny("qwen3_5_moe", rope_parameters={**_ROPE, "rope_type": "yarn", "factor": 4.0}),
            "text_config: rope_parameters: expected rope_type default",
        ),
        (CONFIGS["qwen3_5_moe"] | {"text_config": None}, "text_config: expected an object with model_type "),
        (
            {**CONFIGS["qwen3_5_moe"]["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]},
            "architecture Qwen3_5MoeForCausalLM is not supported; supported are ",
        ),
        (of_tiny("mixtral", tie_word_embeddings=True), "tie_word_embeddings: expected false, found true"),
        (of_tiny("mixtral", num_experts_per_tok=1), "num_experts_per_tok: expected between 2 and num_local_experts=8"),
        (of_tiny("mixtral", router_jitter_noise=0.1), "router_jitter_noise: expected 0 or 0.0, found 0.1"),
        (
            of_tiny("mixtral", rope_scaling={"rope_type": "linear", "factor": 2.0}),
            'rope_scaling: expected rope_type default, found {"rope_type": "linear", "factor": 2.0}',
        ),
        (
            of_tiny("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_scaling: expected rope_type default, linear, llama3 or yarn (dynamic: transformers computes its "
            "frequencies from the longest sequence of a batch, and SGLang from the config), found",
        ),
    ],
)
def test_configs_that_resemble_a_family_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        model_spec(config)
    assert str(refused.value).startswith(f"config: {message}") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "engine", "message"),
    [
        (
            of_tiny("qwen2_moe", mlp_only_layers=[1]),
            RolloutConfig(),
            "model: mlp_only_layers=[1]: SGLang builds experts in every layer of Qwen2MoeForCausalLM; expected "
            "mlp_only_layers=[] and decoder_sparse_step=1",
        ),
        (
            of_tiny("mixtral", rope_theta=500.5),
            RolloutConfig(),
            "model: rope_theta=500.5: SGLang rounds it for MixtralForCausalLM; expected a whole number",
        ),
        (
            of_tiny("mixtral"),
            RolloutConfig(routes=True),
            "rollout.engine.routes=true: expected false: SGLang records no routes of MixtralForCausalLM",
        ),
        (
            of_tiny("gpt_oss"),
            RolloutConfig(tp=2, ep=2),
            "rollout.engine.ep=2: expected 1: SGLang loads all experts of GptOssForCausalLM on every rank; tp cuts "
            "each of them",
        ),
        (
            of_tiny("gpt_oss"),
            RolloutConfig(attention_backend="triton"),
            "rollout.engine.attention_backend=triton: expected null, because GptOssForCausalLM has attention sinks: "
            "SGLang chooses a backend that knows them",
        ),
        (
            of_tiny("gpt_oss"),
            RolloutConfig(routes=True),
            "rollout.engine.routes=true: expected false: not tried with GptOssForCausalLM",
        ),
        (
            of_tiny("qwen3_next"),
            RolloutConfig(precision="fp8"),
            "rollout.engine.precision=fp8: expected null, because Qwen3NextForCausalLM has gated delta nets, with "
            "which it was not tried",
        ),
        (
            of_tiny("qwen3_5_moe"),
            RolloutConfig(routes=True),
            "rollout.engine.routes=true: expected false, because Qwen3_5MoeForConditionalGeneration has gated delta "
            "nets, with which it was not tried",
        ),
        (
            of_tiny("qwen3_next"),
            RolloutConfig(attention_dp=2, tp=2),
            "rollout.engine.attention_dp=2: expected 1, because Qwen3NextForCausalLM has gated delta nets, with "
            "which it was not tried",
        ),
        (
            of_tiny("qwen3_next", linear_num_key_heads=2),
            RolloutConfig(tp=4),
            "rollout.engine.tp=4 does not divide the model's 2 key heads of gated delta nets (linear_num_key_heads)",
        ),
    ],
)
def test_models_that_sglang_would_serve_otherwise_are_refused(
    config: dict[str, Any], engine: RolloutConfig, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_served(model_spec(config), engine)
    assert str(refused.value) == message
