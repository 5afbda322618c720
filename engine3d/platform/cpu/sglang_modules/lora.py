"""Functions in PyTorch in place of the Triton kernels of SGLang's LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Replace the kernels in this process."""
    from sglang.srt.lora import deepseek_mla_correction, layers

    # Of kv_b_proj with latent attention, which folds the weight into queries and outputs.
    deepseek_mla_correction.step_a_q_fwd = _queries_to_rank
    deepseek_mla_correction.step_b_q_fwd = _add_to_queries
    deepseek_mla_correction.step_a_v_fwd = _outputs_to_rank
    deepseek_mla_correction.step_b_v_fwd = _add_to_outputs
    layers.FusedMoEWithLoRA._forward_with_lora = _forward_experts


def _segments(info: Any) -> Iterator[tuple[slice, int, int, float]]:
    """Yield the tokens, slot, rank and scale of each adapter of a batch; none of tokens without one.

    Args:
        info: SGLang's `TorchNativeLoRABatchInfo`.
    """
    start = 0
    for length, slot in zip(info.seg_lens_cpu.tolist(), info.weight_indices_cpu.tolist(), strict=True):
        rank = int(info.lora_ranks_cpu[slot])
        if length and rank:
            yield slice(start, start + length), slot, rank, float(info.scalings_cpu[slot])
        start += length


def _queries_to_rank(queries: Tensor, second: Tensor, info: Any, rows: int) -> Tensor:
    """Multiply queries by the rows of B of the keys.

    Args:
        queries: (tokens, heads, elements of a key).
        second: B of all slots, (slots, heads * rows, rank).
        info: of the batch.
        rows: of B of a head, of its key and its value.

    Returns:
        (tokens, heads, rank).
    """
    tokens, heads, elements = queries.shape
    output = queries.new_zeros(tokens, heads, second.shape[-1])
    for of_adapter, slot, rank, _ in _segments(info):
        of_keys = second[slot].view(heads, rows, -1)[:, :elements, :rank]
        output[of_adapter, :, :rank] = torch.einsum("the,her->thr", queries[of_adapter], of_keys)
    return output


def _add_to_queries(queries: Tensor, first: Tensor, info: Any, base: Tensor) -> Tensor:
    """Add queries of `_queries_to_rank` times A and the scale.

    Args:
        queries: (tokens, heads, rank).
        first: A of all slots, (slots, rank, latent elements).
        info: of the batch.
        base: (tokens, heads, latent elements), which is changed and returned.
    """
    for of_adapter, slot, rank, scale in _segments(info):
        base[of_adapter] += scale * (queries[of_adapter, :, :rank] @ first[slot, :rank])
    return base


def _outputs_to_rank(outputs: Tensor, first: Tensor, info: Any) -> Tensor:
    """Multiply outputs of latent attention by A.

    Args:
        outputs: (tokens, heads, latent elements).
        first: A of all slots, (slots, rank, latent elements).
        info: of the batch.

    Returns:
        (tokens, heads, rank).
    """
    output = outputs.new_zeros(*outputs.shape[:2], first.shape[1])
    for of_adapter, slot, rank, _ in _segments(info):
        output[of_adapter, :, :rank] = outputs[of_adapter] @ first[slot, :rank].T
    return output


def _add_to_outputs(
    outputs: Tensor, second: Tensor, info: Any, base: Tensor, key_elements: int, value_elements: int
) -> Tensor:
    """Add outputs of `_outputs_to_rank` times the rows of B of the values and the scale.

    Args:
        outputs: (tokens, heads, rank).
        second: B of all slots, (slots, heads * (key_elements + value_elements), rank).
        info: of the batch.
        base: (tokens, heads, value_elements), which is changed and returned.
        key_elements: of a head, without those of its position.
        value_elements: of a head.
    """
    heads = outputs.shape[1]
    for of_adapter, slot, rank, scale in _segments(info):
        of_values = second[slot].view(heads, key_elements + value_elements, -1)[:, key_elements:, :rank]
        base[of_adapter] += scale * torch.einsum("thr,hvr->thv", outputs[of_adapter, :, :rank], of_values)
    return base


def _forward_experts(module: Any, hidden: Tensor, topk_output: Any, info: Any, **_: Any) -> Tensor:
    """Compute experts with adapters, as SGLang's `FusedMoEWithLoRA._forward_with_lora` with its Triton runner.

    Args:
        module: SGLang's layer.
        hidden: (tokens, hidden size).
        topk_output: experts and weights of each token.
        info: SGLang's `LoRAInfo`. B has the scale of the adapter in it.

    Raises:
        NotImplementedError: experts are not SwiGLU without biases.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    layer = module.base_layer
    config = layer.moe_runner_config
    if config.activation != "silu" or config.gemm1_alpha is not None or hasattr(layer, "w13_weight_bias"):
        raise NotImplementedError("adapters of experts other than SwiGLU without biases")
    dispatched = layer.dispatcher.dispatch(hidden_states=hidden, topk_output=topk_output)
    output = _experts(layer, dispatched.hidden_states, dispatched.topk_output, info)
    return layer.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output))  # type: ignore[no-any-return]


def _experts(layer: Any, hidden: Tensor, topk: Any, info: Any) -> Tensor:
    """Outputs of the local experts. An expert of another rank has the id -1 in `topk`."""
    output = torch.zeros_like(hidden, dtype=torch.float32)
    slots = info.token_lora_mapping
    for expert in range(layer.num_local_experts):
        token, choice = (topk.topk_ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        inputs, of_tokens = hidden[token], slots[token]
        factors = (info.gate_up_lora_a_weights, info.gate_up_lora_b_weights)
        gate_up = F.linear(inputs, layer.w13_weight[expert]) + _added(inputs, factors, expert, of_tokens, info, 2)
        gate, up = gate_up.chunk(2, dim=-1)
        inputs = F.silu(gate) * up
        factors = (info.down_lora_a_weights, info.down_lora_b_weights)
        down = F.linear(inputs, layer.w2_weight[expert]) + _added(inputs, factors, expert, of_tokens, info, 1)
        output.index_add_(0, token, down.float() * topk.topk_weights[token, choice, None])
    return output.to(hidden.dtype)


def _added(
    inputs: Tensor, factors: tuple[Tensor, Tensor], expert: int, slots: Tensor, info: Any, stacked: int
) -> Tensor:
    """Outputs of an expert's adapters.

    Args:
        inputs: (tokens, columns).
        factors: A, (slots, experts, stacked * rank, columns), and B, (slots, experts, rows, rank).
        expert: the local expert.
        slots: of each token; -1 without an adapter.
        info: SGLang's `LoRAInfo`.
        stacked: layers that are one weight.

    Returns:
        (tokens, rows).
    """
    first, second = factors
    output = inputs.new_zeros(len(inputs), second.shape[2])
    for slot in slots.unique().tolist():
        if slot < 0 or not info.lora_ranks[slot]:
            continue
        of_adapter = slots == slot
        layers = zip(
            F.linear(inputs[of_adapter], first[slot, expert]).chunk(stacked, dim=-1),
            second[slot, expert].chunk(stacked),
            strict=True,
        )
        output[of_adapter] = torch.cat([F.linear(low, rows) for low, rows in layers], dim=-1)
    return output
