"""A model spec in Megatron-Core's terms: its TransformerConfig and its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.attention.delta_net import DeltaNetSubmodules, GatedDeltaNet
from engine3d.models.attention.norm_over_heads import HeadsNormedAttention
from engine3d.models.attention.requirements import check_fused_query_key
from engine3d.models.attention.self_attention import FusedSelfAttention
from engine3d.models.attention.split_on_demand import SplitSelfAttention
from engine3d.models.experts.biased_experts import BiasedRows, PairedColumns, scaled_sigmoid
from engine3d.models.experts.moe_layer import FusedMoELayer, SequenceMoELayer
from engine3d.models.experts.router import Router
from engine3d.models.family import ModelSpec
from engine3d.models.local_modules import CoreAttention, LatentAttention, RMSNorm
from engine3d.models.precision import (
    Precision,
    is_quantised_layer,
    quantises_shared_experts,
    rounded,
    rounded_rows,
)
from engine3d.models.sizes import Delta, Latent, Sizes
from engine3d.platform import platform


def transformer_config(spec: ModelSpec, layout: Layout, dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """Megatron's configuration of the model on this machine. `overrides` are TransformerConfig arguments and win.

    Raises:
        UserError: the layout does not divide the model, or Megatron refuses the arguments.
    """
    spec.check_layout(layout)
    arguments = {**_model(spec), **_experts(spec), **_parallel(layout, dtype), **_stages(spec, layout), **_kernels()}
    config_class = TransformerConfig
    if spec.sizes.latent is not None:
        config_class = MLATransformerConfig
        arguments |= _latent(spec, spec.sizes.latent)
    try:
        return config_class(**arguments | overrides)
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
        "softmax_scale": spec.rope.score_factor / sizes.head_dim**0.5 if spec.rope.score_factor != 1.0 else None,
        "qk_layernorm": sizes.qk_norm,
        "add_qkv_bias": sizes.qkv_bias,
        "add_bias_linear": sizes.mlp_bias or sizes.expert_biases,
        "softmax_type": "learnable" if sizes.sinks else "vanilla",
        "window_size": None if sizes.window is None else (sizes.window - 1, 0),
        "window_attn_skip_freq": None if sizes.window is None else [int(windowed) for windowed in sizes.windowed],
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": sizes.centred_norms,
        "attention_output_gate": sizes.output_gate,
        "layernorm_epsilon": sizes.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": _activation(sizes),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": sizes.initializer_range,
        # Weights come from files: load_weights fills every parameter.
        "perform_initialization": False,
    }


def _activation(sizes: Sizes) -> Callable[[torch.Tensor], torch.Tensor]:
    if not sizes.expert_biases:
        return F.silu
    return quick_gelu if platform.has_transformer_engine else scaled_sigmoid  # type: ignore[no-any-return]


def _latent(spec: ModelSpec, latent: Latent) -> dict[str, Any]:
    rope = spec.rope
    return {
        "softmax_scale": None,
        "qk_layernorm": True,
        "kv_channels": latent.value_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": spec.sizes.head_dim - latent.rotary_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.base,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        # Megatron-Core's fused kernel knows yarn alone, and takes sine and cosine in the model's dtype.
        "apply_rope_fusion": False,
    }


def _experts(spec: ModelSpec) -> dict[str, Any]:
    sizes = spec.sizes
    # Megatron-Core refuses stages that pass sequences of several lengths with its default, without experts too.
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if not sizes.experts:
        return dispatcher
    return dispatcher | {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.experts_per_token,
        "moe_ffn_hidden_size": sizes.expert_ffn,
        "moe_layer_freq": [int(sparse) for sparse in sizes.sparse],
        "moe_router_dtype": "fp32",
        # Of the kinds that do not depend on micro-batches, that of the whole update; see `experts.load_balance`.
        "moe_router_load_balancing_type": "global_aux_loss",
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


def _stages(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """The layers of each virtual stage, in pipeline order, and messages between stages."""
    if layout.pp == 1:
        return {}
    stages = [["decoder"] * layers for layers in spec.rules.stage_layers(layout)]
    arguments = {"pipeline_model_parallel_layout": [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]}
    if layout.vpp == 1:
        return arguments
    # A batch of messages in both directions would mix them up where the next stage is also the previous one (pp=2).
    return arguments | {
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _kernels() -> dict[str, Any]:
    fused = platform.has_transformer_engine
    return {
        "transformer_impl": "transformer_engine" if fused else "local",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "bias_activation_fusion": fused,
        # There is no dropout, and hardly a model with a bias: a compiled sum costs more to call than it saves.
        "bias_dropout_fusion": False,
        "apply_rope_fusion": fused,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": platform.has_fused_weight_gradient,
    }


def layer_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    *,
    chunk: int = 0,
    fused_experts: bool = False,
    copy_engine_timeout_s: float | None = None,
    fused_query_key: bool = False,
    precision: Precision | None = None,
) -> TransformerBlockSubmodules:
    """Megatron's layers for a model chunk of this rank: Transformer Engine where it is present, else Megatron's own.

    Megatron's process groups must have been started.

    Args:
        spec: the model.
        config: Megatron's configuration.
        chunk: the rank's virtual stage.
        fused_experts: compute a layer's experts as one fused operation, which needs Transformer Engine.
        copy_engine_timeout_s: limit of each wait of the copy-engine dispatcher for another rank; None for Megatron-
            Core's dispatcher. Needs `fused_experts`.
        fused_query_key: fuse the computation of queries and keys, which passes `check_fused_query_key`.
        precision: of the operands of GEMMs where there is no Transformer Engine, for which the configuration says it.

    Raises:
        UserError: they cannot be made in one.
    """
    vp_stage = None if config.virtual_pipeline_model_parallel_size is None else chunk
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=platform.has_transformer_engine,
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    layers = block.layer_specs
    first = get_transformer_layer_offset(config, vp_stage)
    if fused_query_key:
        check_fused_query_key(spec, tp=config.tensor_model_parallel_size)
    if spec.sizes.latent is not None:
        layers = [_with_attention(layer, module=LatentAttention) for layer in layers]
    elif spec.sizes.norm_over_heads:
        layers = [_with_attention(layer, module=HeadsNormedAttention) for layer in layers]
    elif fused_query_key or config.context_parallel_size > 1:
        attention = FusedSelfAttention if fused_query_key else SplitSelfAttention
        layers = [_with_attention(layer, module=attention) for layer in layers]
    layers = [_with_router(layer) for layer in layers]
    if platform.has_transformer_engine:
        layers = [_with_lean_modules(layer, config, fused_experts, copy_engine_timeout_s) for layer in layers]
    else:
        layers = [_with_local_modules(layer) for layer in layers]
        if spec.sizes.expert_biases:
            layers = [_with_biased_experts(layer) for layer in layers]
        if precision is not None:
            linears = platform.quantised_linears(rounded_rows, rounded)
            left_out = () if quantises_shared_experts(spec) else ("shared_experts",)
            layers = [
                _with_linears(layer, linears, left_out) if is_quantised_layer(spec, number) else layer
                for number, layer in enumerate(layers, first)
            ]
        block = replace(block, layer_norm=RMSNorm)
    if spec.sizes.output_bias and not config.add_bias_linear:
        layers = [_with_output_bias(layer) for layer in layers]
    if spec.sizes.delta is not None:
        layers = [
            _with_delta_net(layer, spec.sizes.delta) if spec.sizes.is_linear(number) else layer
            for number, layer in enumerate(layers, first)
        ]
    return replace(block, layer_specs=layers)


def mtp_spec(spec: ModelSpec, config: TransformerConfig) -> ModuleSpec:
    """Megatron's layer for multi-token prediction, with the modules of the model's last layer."""
    layers = layer_spec(spec, config).layer_specs
    mtp = get_mtp_layer_spec_for_backend(layers[-1], LocalSpecProvider())
    return replace(mtp, submodules=replace(mtp.submodules, enorm=RMSNorm, hnorm=RMSNorm, layer_norm=RMSNorm))


def _with_delta_net(layer: ModuleSpec, delta: Delta) -> ModuleSpec:
    attention = layer.submodules.self_attention.submodules
    linears = DeltaNetSubmodules(attention.linear_qkv, attention.linear_proj)
    return _with_attention(layer, module=GatedDeltaNet, submodules=linears, params={"delta": delta})


def _with_local_modules(layer: ModuleSpec) -> ModuleSpec:
    layer = _with_norms(layer, RMSNorm)
    modules = replace(layer.submodules.self_attention.submodules, core_attention=CoreAttention)
    return _with_attention(layer, submodules=modules)


def _with_biased_experts(layer: ModuleSpec) -> ModuleSpec:
    moe = layer.submodules.mlp.keywords["submodules"]
    experts = replace(moe.experts.keywords["submodules"], linear_fc1=PairedColumns, linear_fc2=BiasedRows)
    moe = replace(moe, experts=partial(moe.experts, submodules=experts))
    mlp = partial(layer.submodules.mlp, submodules=moe)
    return replace(layer, submodules=replace(layer.submodules, mlp=mlp))


def _with_linears(node: Any, linears: Mapping[type, type], left_out: Collection[str]) -> Any:
    """Replace linear layers in a specification of a layer, or of a part of one.

    Args:
        node: the specification.
        linears: replacements.
        left_out: names of sub-modules that stay as they are.
    """
    replaced = partial(_with_linears, linears=linears, left_out=left_out)
    if isinstance(node, partial):
        keywords = {name: replaced(value) for name, value in node.keywords.items()}
        return partial(node.func, *map(replaced, node.args), **keywords)
    if is_dataclass(node) and not isinstance(node, type):
        values = {field.name: getattr(node, field.name) for field in fields(node) if field.init}
        values = {name: value if name in left_out else replaced(value) for name, value in values.items()}
        return replace(node, **values)
    return linears.get(node, node) if isinstance(node, type) else node


def _with_router(layer: ModuleSpec) -> ModuleSpec:
    """The layer, with our own router if it has experts."""
    mlp = layer.submodules.mlp
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return layer
    submodules = replace(mlp.keywords["submodules"], router=Router)
    mlp = partial(SequenceMoELayer, *mlp.args, **mlp.keywords | {"submodules": submodules})
    return replace(layer, submodules=replace(layer.submodules, mlp=mlp))


def _with_lean_modules(
    layer: ModuleSpec, config: TransformerConfig, fused_experts: bool, copies_s: float | None
) -> ModuleSpec:
    """Transformer Engine's layers, but for the norms that are not part of a linear layer, and for experts."""
    from engine3d.models import transformer_engine_modules as lean

    if not (config.layernorm_zero_centered_gamma or config.fused_residual_rmsnorm):
        layer = _with_norms(layer, lean.KernelRMSNorm)
    mlp = layer.submodules.mlp
    if isinstance(mlp, partial) and mlp.func is SequenceMoELayer and lean.may_group(config):
        moe = mlp.keywords["submodules"]
        linear = {"linear_fc1": lean.GroupedColumns, "linear_fc2": lean.GroupedRows}
        experts = replace(moe.experts.keywords["submodules"], **linear)
        moe = replace(moe, experts=partial(moe.experts, submodules=experts))
        of_layer = mlp.keywords | {"submodules": moe}
        if fused_experts:
            mlp = partial(FusedMoELayer, *mlp.args, **of_layer, copies_timeout_s=copies_s)
        else:
            mlp = partial(SequenceMoELayer, *mlp.args, **of_layer)
        layer = replace(layer, submodules=replace(layer.submodules, mlp=mlp))
    return layer


def _with_norms(layer: ModuleSpec, norm: type) -> ModuleSpec:
    """`norm` wherever the layer and its attention have one of their own."""

    def normed(submodules: Any) -> Any:
        names = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")
        present = [name for name in names if getattr(submodules, name, None) not in (None, IdentityOp)]
        return replace(submodules, **dict.fromkeys(present, norm))

    layer = _with_attention(layer, submodules=normed(layer.submodules.self_attention.submodules))
    return replace(layer, submodules=normed(layer.submodules))


def _with_attention(layer: ModuleSpec, **changes: Any) -> ModuleSpec:
    attention = replace(layer.submodules.self_attention, **changes)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _with_output_bias(layer: ModuleSpec) -> ModuleSpec:
    """Megatron gives attention's output projection a bias only together with the MLP; here it has one alone."""
    attention = layer.submodules.self_attention
    linear: Callable[..., Any] = attention.submodules.linear_proj

    def biased(*args: Any, **kwargs: Any) -> Any:
        return linear(*args, **{**kwargs, "bias": True})

    return _with_attention(layer, submodules=replace(attention.submodules, linear_proj=biased))
