"""A rank's part of a model, as Megatron-Core GPTModels: one for each of its virtual pipeline stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.local_modules import ValueHead
from engine3d.models.megatron_config import layer_spec, mtp_spec, transformer_config
from engine3d.models.precision import Precision

# It warns at every build that GPTModel will give way to HybridModel; the version is pinned.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_model(
    spec: ModelSpec,
    layout: Layout,
    dtype: torch.dtype,
    *,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
    fused_experts: bool = False,
    copy_engine_timeout_s: float | None = None,
    fused_query_key: bool = False,
    precision: Precision | None = None,
) -> torch.nn.Module:
    """Build this rank's part of the model. Its parameters hold nothing yet: `load_weights` fills them.

    Megatron's process groups must have been started for the layout. The output is logits of this tp rank's part of the
    padded vocabulary, [b, s, padded_vocabulary / tp] in `dtype`, or with a value head float32 [b, s, 1].

    With virtual stages the result is a ModuleList of the rank's GPTModels (`model_chunks`).

    Args:
        spec: the model.
        layout: how it is cut.
        dtype: of the parameters.
        pre_process: whether this rank embeds tokens, in its first chunk; the first pipeline stage unless given.
        post_process: whether this rank has the output layer, in its last chunk; the last pipeline stage unless given.
        overrides: arguments of Megatron's TransformerConfig.
        fused_experts, copy_engine_timeout_s, fused_query_key, precision: see `layer_spec`.

    Raises:
        UserError: the layout does not divide the model, Megatron refuses an argument, or `fused_query_key` cannot be.
    """
    config = transformer_config(spec, layout, dtype, **(overrides or {}))
    pre_process = parallel_state.is_pipeline_first_stage() if pre_process is None else pre_process
    post_process = parallel_state.is_pipeline_last_stage() if post_process is None else post_process
    chunks = [
        _build_chunk(
            spec,
            layout,
            config,
            layer_spec(
                spec,
                config,
                chunk=chunk,
                fused_experts=fused_experts,
                copy_engine_timeout_s=copy_engine_timeout_s,
                fused_query_key=fused_query_key,
                precision=precision,
            ),
            pre_process and chunk == 0,
            post_process and chunk == layout.vpp - 1,
            chunk,
        )
        for chunk in range(layout.vpp)
    ]
    return torch.nn.ModuleList(chunks) if layout.vpp > 1 else chunks[0]


def build_mtp(
    spec: ModelSpec,
    layout: Layout,
    dtype: torch.dtype,
    trunk: GPTModel,
    overrides: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Build this rank's part of the layer for multi-token prediction, which is no part of the model that it is next to.

    Its inputs are cut off from the gradient (`mtp_detach_heads`). Its activations are kept: they are few.

    Args:
        spec: of the model with the layer.
        layout: without pipeline stages.
        dtype: of the parameters.
        trunk: the rank's part of the model.
        overrides: arguments of Megatron's TransformerConfig.
    """
    detached = {"mtp_num_layers": 1, "mtp_detach_heads": True, "recompute_granularity": None}
    config = transformer_config(spec, layout, dtype, **{**(overrides or {}), **detached})
    layer = build_module(mtp_spec(spec, config), config=config, pg_collection=trunk.pg_collection)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(torch.cuda.current_device())
    return layer  # type: ignore[no-any-return]


def with_mtp(trunk: GPTModel, layer: torch.nn.Module) -> torch.nn.Module:
    """Join the modules of a model and of its layer for multi-token prediction, as the rules name their parameters."""
    joined = torch.nn.Module()
    for name, module in (*trunk.named_children(), ("mtp", layer)):
        joined.add_module(name, module)
    return joined


def model_chunks(model: torch.nn.Module) -> list[Any]:
    """The GPTModels of a rank's part of a model, by virtual stage."""
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]


def _build_chunk(
    spec: ModelSpec,
    layout: Layout,
    config: TransformerConfig,
    layers: TransformerBlockSubmodules,
    pre_process: bool,
    post_process: bool,
    chunk: int,
) -> GPTModel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=spec.padded_vocabulary(layout),
        max_sequence_length=spec.sizes.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.sizes.tied and not spec.value_head,
        position_embedding_type="rope",
        rotary_percent=spec.rope.rotary_share,
        rotary_base=spec.rope.base,
        vp_stage=chunk if layout.vpp > 1 else None,
    )
    if spec.sizes.experts:  # Megatron-Core makes routers and gates on the CPU, and moves them when they are trained
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.cuda.current_device())
    if spec.sizes.latent is None:
        frequencies = model.rotary_pos_emb.inv_freq
        model.rotary_pos_emb.inv_freq = spec.rope.inverse_frequencies(spec.sizes.head_dim).to(frequencies.device)
    if spec.value_head and post_process:
        model.output_layer = ValueHead(config, parallel_state.get_tensor_model_parallel_group(), bias=spec.value_bias)
    return model
