"""A rank's part of a model, as a Megatron-Core GPTModel."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.local_modules import ValueHead
from engine3d.models.megatron_config import layer_spec, transformer_config

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
    one_step_experts: bool = False,
    expert_copies_s: float | None = None,
    fused_query_key: bool = False,
) -> GPTModel:
    """Build this rank's part of the model. Its parameters hold nothing yet: `load_weights` fills them.

    Megatron's process groups must have been started for the layout. The output is logits of this tp rank's part of the
    padded vocabulary, [b, s, padded_vocabulary / tp] in `dtype`, or with a value head float32 [b, s, 1].

    Args:
        spec: the model.
        layout: how it is cut.
        dtype: of the parameters.
        pre_process: whether this rank embeds tokens; the first pipeline stage unless given.
        post_process: whether this rank has the output layer; the last pipeline stage unless given.
        overrides: arguments of Megatron's TransformerConfig.
        one_step_experts, expert_copies_s, fused_query_key: see `layer_spec`.

    Raises:
        UserError: the layout does not divide the model, Megatron refuses an argument, or `fused_query_key` cannot be.
    """
    config = transformer_config(spec, layout, dtype, **(overrides or {}))
    post_process = parallel_state.is_pipeline_last_stage() if post_process is None else post_process
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(
            spec,
            config,
            one_step_experts=one_step_experts,
            expert_copies_s=expert_copies_s,
            fused_query_key=fused_query_key,
        ),
        vocab_size=spec.padded_vocabulary(layout),
        max_sequence_length=spec.sizes.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage() if pre_process is None else pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.sizes.tied and not spec.value_head,
        position_embedding_type="rope",
        rotary_base=spec.rope.base,
    )
    if spec.sizes.latent is None:
        frequencies = model.rotary_pos_emb.inv_freq
        model.rotary_pos_emb.inv_freq = spec.rope.inverse_frequencies(spec.sizes.head_dim).to(frequencies.device)
    if spec.value_head and post_process:
        model.output_layer = ValueHead(config, parallel_state.get_tensor_model_parallel_group(), bias=spec.value_bias)
    return model
