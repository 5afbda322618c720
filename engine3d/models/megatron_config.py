"""A model spec in Megatron-Core's terms: its TransformerConfig and its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.local_modules import CoreAttention, RMSNorm
from engine3d.platform import platform


def transformer_config(spec: ModelSpec, layout: Layout, dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """Megatron's configuration of the model. `overrides` are TransformerConfig arguments and win.

    Raises:
        UserError: the layout does not divide the model, or Megatron refuses the arguments.
    """
    spec.check_layout(layout)
    if layout.cp > 1 and not platform.has_transformer_engine:
        raise UserError(f"layout: cp={layout.cp}: expected 1, because context parallelism needs Transformer Engine")
    arguments = {**_model(spec), **_experts(spec), **_parallel(layout, dtype), **_kernels(), **overrides}
    try:
        return TransformerConfig(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"model: Megatron-Core refuses the configuration: {' '.join(str(error).split())}") from error


def _model(spec: ModelSpec) -> dict[str, Any]:
    sizes = spec.sizes
    return {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_dim,
        "qk_layernorm": sizes.qk_norm,
        "add_qkv_bias": sizes.attention_bias,
        "add_bias_linear": sizes.mlp_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": sizes.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": sizes.initializer_range,
        # Weights come from files: load_weights fills every parameter.
        "perform_initialization": False,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    sizes = spec.sizes
    if not sizes.experts:
        return {}
    return {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.experts_per_token,
        "moe_ffn_hidden_size": sizes.expert_ffn,
        "moe_layer_freq": [int(sparse) for sparse in sizes.sparse],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        **spec.family.megatron(sizes),
    }


def _parallel(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def _kernels() -> dict[str, Any]:
    fused = platform.has_transformer_engine
    return {
        "transformer_impl": "transformer_engine" if fused else "local",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": platform.has_fused_weight_gradient,
    }


def layer_spec(spec: ModelSpec, config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage; Megatron's process groups must have been started."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=platform.has_transformer_engine, normalization="RMSNorm"
    )
    layers = block.layer_specs
    if not platform.has_transformer_engine:
        layers = [_with_local_modules(layer) for layer in layers]
        block = replace(block, layer_norm=RMSNorm)
    if spec.sizes.attention_bias and not config.add_bias_linear:
        layers = [_with_output_bias(layer) for layer in layers]
    return replace(block, layer_specs=layers)


def _with_local_modules(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    norms = {
        name: RMSNorm if norm not in (None, IdentityOp) else norm
        for name in ("q_layernorm", "k_layernorm")
        for norm in (getattr(attention.submodules, name),)
    }
    modules = replace(attention.submodules, core_attention=CoreAttention, **norms)
    submodules = replace(
        layer.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=replace(attention, submodules=modules),
    )
    return replace(layer, submodules=submodules)


def _with_output_bias(layer: ModuleSpec) -> ModuleSpec:
    """Megatron gives attention's output projection a bias only together with the MLP; here it has one alone."""
    attention = layer.submodules.self_attention
    linear: Callable[..., Any] = attention.submodules.linear_proj

    def biased(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **{**kwargs, "bias": True})

    modules = replace(attention.submodules, linear_proj=biased)
    submodules = replace(layer.submodules, self_attention=replace(attention, submodules=modules))
    return replace(layer, submodules=submodules)
