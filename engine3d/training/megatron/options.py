"""Fields of Megatron-Core's TransformerConfig that `train.megatron` may set, and the reasons for refusing others.

An option is listed once it was tested: log-probs, gradients and weights are unchanged, or change as it says.
docs/megatron_options.md is this table as a page; `python -m engine3d.training.megatron.options` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

PAGE = "docs/megatron_options.md"
BALANCE_LOSSES = ("seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class Option:
    """A field that may be set.

    Args:
        name: Megatron-Core's.
        expected: its values, in words.
        accepts: True if a value is one of them.
        effect: its effect, and the reason for which results stay right.
        tried: the test, or the measurement on GPUs.
        needs_experts: True if it has no effect on a model without experts.
        needs_gpu: True if it needs Transformer Engine, except for the value `plain`.
        plain: the value that works on any device.
        learns: True if it changes training, and so has no effect on a model that is not trained.
    """

    name: str
    expected: str
    accepts: Callable[[Any], bool]
    effect: str
    tried: str
    needs_experts: bool = True
    needs_gpu: bool = False
    plain: Any = False
    learns: bool = False


@dataclass(frozen=True)
class Refused:
    """Fields that may not be set, for one reason.

    Args:
        reason: the reason, and the expected setting.
        names: the fields, with the setting to use instead where there is one.
    """

    reason: str
    names: Mapping[str, str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _is_balance(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    if value == "none":
        return True
    return bool(kinds) and all(kind in BALANCE_LOSSES for kind in kinds) and len(set(kinds)) == len(kinds)


OPTIONS = (
    Option(
        "moe_token_dispatcher_type",
        "alltoall or allgather",
        lambda value: value in ("alltoall", "allgather"),
        "Dispatch of tokens to the ranks of their experts. With allgather (`train.packing=true`, pp=1) ranks of an "
        "expert-parallel group see each other's tokens, and experts may be fused",
        "tests/engine3d/training/test_engine.py, tests/engine3d/models/experts/test_load_balance.py",
    ),
    Option(
        "moe_router_load_balancing_type",
        "none, seq_aux_loss, global_aux_loss, or a list of the last two",
        _is_balance,
        "Tokens over which the balance loss measures an expert's load: those of each sequence, or those of the "
        "complete update, which costs one more forward pass. The default is global_aux_loss. "
        "`engine3d/models/experts/load_balance.py` has the formulas. Gradients do not depend on layout, "
        "micro-batches, packing or padding",
        "tests/engine3d/models/experts/test_load_balance.py",
        learns=True,
    ),
    Option(
        "moe_aux_loss_coeff",
        "a number of at least 0, or a list with one for each of moe_router_load_balancing_type",
        lambda value: _is_number(value) or (isinstance(value, list) and bool(value) and all(map(_is_number, value))),
        "Coefficient of the balance loss of every layer, a mean over the update's tokens",
        "tests/engine3d/models/experts/test_load_balance.py",
        learns=True,
    ),
    Option(
        "moe_z_loss_coeff",
        "a number of at least 0",
        _is_number,
        "Coefficient of the z loss of every layer: the squared log-sum-exp of the router's logits, a mean over the "
        "update's tokens",
        "tests/engine3d/models/experts/test_load_balance.py",
        learns=True,
    ),
    Option(
        "moe_router_bias_update_rate",
        "a number of at least 0",
        _is_number,
        "Auxiliary-loss-free load balancing: step of each expert bias after an update, against the expert's load. "
        "DeepSeek-V3 used 0.001, the default is 0. Only for families with an expert bias (DeepSeek-V3, GLM-4.5, "
        "MiniMax-M2). The bias is saved, exported and sent to the engines like weights",
        "tests/engine3d/models/experts/test_load_balance.py",
        learns=True,
    ),
    Option(
        "moe_router_fusion",
        "true or false",
        lambda value: isinstance(value, bool),
        "Fused router: Transformer Engine's kernels for the choice of experts, for routers with a softmax (Qwen3-MoE)",
        "benchmarks/results/train",
        needs_gpu=True,
    ),
    Option(
        "attention_backend",
        "auto or flash",
        lambda value: value in ("auto", "flash"),
        "Attention of Transformer Engine: auto is its preference, on Hopper cuDNN's; flash is FlashAttention 4 "
        "(`train.packing=true`, bfloat16, head_dim 64 or 128). Log-probs and gradients differ by the order of sums",
        "tests/engine3d/training/test_transformer_engine.py",
        needs_experts=False,
        needs_gpu=True,
        plain="auto",
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}

_BALANCE_REFUSED = {
    "aux_loss": "its load is that of a micro-batch, so that gradients would depend on micro-batches and layout",
    "sinkhorn": "it routes otherwise in training than SGLang does",
    "quantile_balancing": "it routes by a bias that SGLang does not have",
}


def _fields(names: str, instead: str = "") -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


REFUSED = (
    Refused(
        "it has a setting of its own",
        {
            "tensor_model_parallel_size": "train.layout.tp",
            "pipeline_model_parallel_size": "train.layout.pp",
            "virtual_pipeline_model_parallel_size": "train.layout.vpp",
            **_fields(
                "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
                "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
                "train.layout.stages",
            ),
            "context_parallel_size": "train.layout.cp",
            "expert_model_parallel_size": "train.layout.ep",
            "expert_tensor_parallel_size": "train.layout.etp",
            "sequence_parallel": "train.sequence_parallel",
            "deterministic_mode": "train.deterministic",
            "recompute_num_layers": "train.recompute_layers",
            "moe_enable_routing_replay": "train.routing_replay",
            **_fields(
                "recompute_granularity recompute_method recompute_modules moe_layer_recompute", "train.recompute"
            ),
            **_fields("first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", "train.fp8"),
            **_fields("params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype", "train.dtype"),
        },
    ),
    Refused(
        "it is derived from train.layout, and the weights' places with it",
        _fields(
            "microbatch_group_size_per_vp_stage variable_seq_lengths "
            "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank cp_comm_type "
            "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
            "expert_gtp_weight_remat_size transformer_impl moe_grouped_gemm moe_single_grouped_weight "
            "moe_single_grouped_bias use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert"
        ),
    ),
    Refused(
        "it is of the model, and SGLang would serve another one; expected in its config.json",
        _fields(
            "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels num_moe_experts "
            "moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_shared_expert_intermediate_size "
            "moe_shared_expert_gate moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices "
            "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
            "moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size "
            "moe_shared_expert_glu_interleave_size normalization layernorm_epsilon layernorm_zero_centered_gamma "
            "qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold add_bias_linear add_qkv_bias "
            "gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset window_size "
            "window_attn_skip_freq softmax_scale softmax_type attention_output_gate no_rope_freq rotary_interleaved "
            "mrope_section multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
            "rope_type rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast "
            "beta_slow mscale mscale_all_dim apply_residual_connection_post_layernorm fp32_residual_connection "
            "apply_query_key_layer_scaling experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim "
            "dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff "
            "dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation "
            "dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 linear_attention_freq "
            "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
            "linear_num_value_heads use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult "
            "mup_base_head_dim mup_attn_scale_power is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups "
            "mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path heterogeneous_block_specs"
        ),
    ),
    Refused(
        "it draws or drops what SGLang does not, so that the ratio of the loss would be of two models",
        _fields(
            "hidden_dropout attention_dropout moe_input_jitter_eps moe_expert_capacity_factor "
            "moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity moe_token_dropping moe_token_drop_policy "
            "moe_router_force_load_balancing moe_router_force_biased moe_router_quantile_balancing_ema"
        ),
    ),
    Refused(
        "it computes in another precision than weights, log-probs and memory were tried in",
        _fields(
            "fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
            "fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention fp4 "
            "fp4_recipe fp4_param fp4_quantizer_factory tp_only_amax_red use_kitchen use_kitchen_attention "
            "kitchen_attention_backend quant_recipe activation_func_fp8_input_store "
            "moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_dtype "
            "attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul"
        ),
    ),
    Refused(
        "the engine sets it: gradients are sums over micro-batches and ranks, by the weights that a loss carries",
        _fields(
            "calculate_per_token_loss finalize_model_grads_func grad_scale_func moe_grad_scale_func no_sync_func "
            "grad_sync_func param_sync_func gradient_accumulation_fusion defer_embedding_wgrad_compute "
            "wgrad_deferral_limit delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad "
            "experimental_attention_variant_loss_scale_func num_microbatches_with_partial_activation_checkpoints"
        ),
    ),
    Refused(
        "it would be ignored: weights come from files, losses are our own, and train.mtp is the setting for drafts",
        _fields(
            "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads "
            "mtp_hybrid_override_pattern mtp_grad_scale_func mtp_standalone cross_entropy_loss_fusion "
            "cross_entropy_fusion_impl init_method init_method_std output_layer_init_method embedding_init_method "
            "embedding_init_method_std perform_initialization use_cpu_initialization init_model_with_meta_device "
            "timers barrier_with_L1_time config_logger_dir test_mode moe_per_layer_logging log_max_attention_logit "
            "hetereogenous_dist_checkpoint flash_decode inference_rng_tracker inference_sampling_seed "
            "nccl_all_reduce_for_prefill use_inference_optimized_layers inference_fuse_tp_communication "
            "inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
            "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type "
            "inference_cuda_graph_scope moe_pad_experts_for_cuda_graph_inference mlp_chunks_for_prefill "
            "cache_mla_latents"
        ),
    ),
)
_REASONS = {name: (refused.reason, instead) for refused in REFUSED for name, instead in refused.names.items()}


def refusals(megatron: Mapping[str, Any]) -> list[str]:
    """Reasons for refusing fields or their values; empty if all may be set."""
    errors = []
    for name, value in megatron.items():
        option = BY_NAME.get(name)
        if option is None:
            reason, instead = _REASONS.get(name, ("", ""))
            if not reason:
                reason = f"it is none of the options that were tried; expected one of {', '.join(BY_NAME)} ({PAGE})"
            errors.append(f"{name}: {reason}{f'; expected {instead}' if instead else ''}")
        elif not option.accepts(value):
            why = _why_not(value) if name == "moe_router_load_balancing_type" else ""
            errors.append(f"{name}={value!r}{why}; expected {option.expected}")
    return errors


def _why_not(balance: Any) -> str:
    for kind in balance if isinstance(balance, list) else [balance]:
        if isinstance(kind, str) and kind in _BALANCE_REFUSED:
            return f": {_BALANCE_REFUSED[kind]}"
    return ""


def page() -> str:
    """docs/megatron_options.md."""
    lines = ["# Options of Megatron-Core", "", *_INTRODUCTION, "", "| option | values | what it does | tried by |"]
    lines.append("|---|---|---|---|")
    for option in OPTIONS:
        where = "; on GPUs only" if option.needs_gpu else ""
        tried = ", ".join(f"`{path}`" for path in option.tried.split(", "))
        lines.append(f"| `{option.name}` | {option.expected} | {option.effect}{where} | {tried} |")
    lines += ["", "## Refused", ""]
    for refused in REFUSED:
        names = [f"`{name}`" + (f" (`{instead}`)" if instead else "") for name, instead in refused.names.items()]
        lines.append(f"- **{refused.reason[0].upper()}{refused.reason[1:]}**: {', '.join(names)}.")
    lines += ["- Any other: **it was not tried**."]
    return "\n".join(lines) + "\n"


_INTRODUCTION = (
    "`train.megatron`, and `critic.train.megatron` where a critic has its own `train`, set fields of Megatron-Core's",
    "TransformerConfig by their names there. Only tested options are accepted, because others could change log-probs,",
    "gradients or weights silently. `hybridflow check` refuses all others, and options that do not fit a role's model,",
    "layout or devices. This page is generated from",
    "`engine3d/training/megatron/options.py`: `python -m engine3d.training.megatron.options` prints it.",
)

if __name__ == "__main__":
    print(page(), end="")
