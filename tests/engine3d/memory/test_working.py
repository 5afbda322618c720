"""Memory at work over context-parallel ranks and pipeline stages, by hand and by its properties."""

from __future__ import annotations

from functools import partial
from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.reshard_plan import named_model
from engine3d.layout import Layout
from engine3d.memory import WorkingBytes, inference_peak, resident_by_rank, update_peak
from engine3d.memory.activations import (
    gradients_of_ring,
    hidden_state,
    made_by_ring,
    saved_by_attention,
    saved_by_layer,
)
from engine3d.memory.working import _chunk_bytes, peer_memory
from engine3d.models import ModelSpec, model_spec
from engine3d.models.attention.delta_net import GatedDeltaNet, GatedNorm
from engine3d.training.config import TrainConfig
from tests.support.tiny_families import CONFIGS

SPEC = named_model("qwen3-30b-a3b")
FULL = TrainConfig(recompute="full")
ALIKE = 48 * 128 * 2
"""More than the padding of a rank's buffers, in bytes."""


def _update(layout: Layout, stage: int = 0, config: TrainConfig = FULL, **arguments: Any) -> WorkingBytes:
    at = layout.coordinates(stage * layout.stage_size)
    return update_peak(SPEC, layout, at, config, **{"tokens": 8192} | arguments)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_two_context_parallel_ranks_keep_half_each(recompute: str) -> None:
    config = TrainConfig.model_validate({"recompute": recompute, "logits_tokens": 100_000})
    one, two = (_update(Layout(cp=cp), config=config) for cp in (1, 2))
    assert two.activations * 2 == one.activations
    # The gradient of the output layer's weight is complete on either.
    weight = 2 * 151936 * 2048
    assert (two.logits - weight) * 2 == one.logits - weight
    assert _update(Layout(cp=2), tokens=8191) == _update(Layout(cp=2), tokens=8192)


def test_keys_and_values_of_a_ring_by_hand() -> None:
    # 4 groups with a key and a value of 128 elements each, 32 heads with an output of 128, in two bytes.
    keys_and_values, output = 4 * 2 * 128, 32 * 128
    assert made_by_ring(SPEC.sizes, Layout(cp=4), 2) == 2 * (3 * keys_and_values + 4 * output)
    assert made_by_ring(SPEC.sizes, Layout(cp=4, tp=2), 2) == (3 * keys_and_values + 4 * output)
    assert gradients_of_ring(SPEC.sizes, Layout(cp=4), 2) == 2 * (5 * keys_and_values + 3 * output)
    latent = named_model("deepseek-v3").sizes  # 128 heads with keys of 192 elements and values of 128
    assert made_by_ring(latent, Layout(cp=2, tp=8), 2) == 2 * (16 * (192 + 128) + 2 * 16 * 128)
    assert made_by_ring(SPEC.sizes, Layout(), 2) == gradients_of_ring(SPEC.sizes, Layout(), 2) == 0
    inference = inference_peak(SPEC, Layout(cp=32), Layout(cp=32).coordinates(0), FULL, tokens=32 * 1000)
    # Next to it the input of the norm and of the projection, queries and keys before and after their norms, values, the
    # output and its statistics: more than what any MLP keeps of a layer.
    attention = 2 * (2 * 2048 + 2 * 36 * 128 + 4 * 128 + output) + 4 * 32
    assert inference.layer == 1000 * (attention + 2 * (31 * keys_and_values + 32 * output))


def test_memory_of_other_ranks_tokens_is_of_a_ranks_share() -> None:
    config = TrainConfig(copy_engine_dispatcher=True, megatron={"moe_token_dispatcher_type": "allgather"})
    one, two = (peer_memory(SPEC, Layout(ep=4, cp=cp, dp=4 // cp), config, tokens=8192) for cp in (1, 2))
    assert two * 2 == one > 0


def test_the_optimizer_is_sharded_over_context_and_data_parallel_ranks() -> None:
    resident = [
        resident_by_rank(SPEC, layout, layout.coordinates(0), FULL)
        for layout in (Layout(dp=4), Layout(cp=4), Layout(cp=2, dp=2))
    ]
    assert resident[0] == resident[1] == resident[2]


def _kept(spec: ModelSpec, layout: Layout, micro_batches: int | None = None) -> list[int]:
    """Activations of each stage."""
    ranks = [layout.coordinates(stage * layout.stage_size) for stage in range(layout.pp)]
    return [update_peak(spec, layout, at, FULL, tokens=8192, micro_batches=micro_batches).activations for at in ranks]


def test_the_stages_together_keep_what_the_model_keeps() -> None:
    for layout in (Layout(pp=4), Layout(pp=3), Layout(pp=4, vpp=2), Layout(pp=2, stages=(10, 38))):
        if layout.vpp == 1:
            assert sum(_kept(SPEC, layout, 1)) == _update(Layout()).activations
        ranks = [layout.coordinates(stage) for stage in range(layout.pp)]
        weights = [resident_by_rank(SPEC, layout, at, FULL).weights for at in ranks]
        assert sum(weights) == pytest.approx(2 * SPEC.parameter_count(), abs=ALIKE)


def test_virtual_stages_raise_what_the_first_stage_keeps() -> None:
    layer = hidden_state(SPEC.sizes, Layout(), 2, sequence_parallel=True) * 8192
    even = (12,) * 4
    plain = _kept(SPEC, Layout(pp=4, stages=even))
    assert plain == [4 * 12 * layer, 3 * 12 * layer, 2 * 12 * layer, 12 * layer]
    virtual = _kept(SPEC, Layout(pp=4, vpp=2, stages=(6,) * 8))
    # (pp - rank - 1) * 2 + (vpp - 1) * pp + 1 chunks of six layers.
    assert virtual == [11 * 6 * layer, 9 * 6 * layer, 7 * 6 * layer, 5 * 6 * layer]
    four = _kept(SPEC, Layout(pp=4, vpp=4, stages=(3,) * 16))
    assert four[0] == 19 * 3 * layer
    assert _kept(SPEC, Layout(pp=4, vpp=2, stages=(6,) * 8), 4)[0] == 8 * 6 * layer  # all there are


def test_the_stage_with_the_most_layers_keeps_the_most() -> None:
    layout = Layout(pp=4, stages=(6, 10, 20, 12))
    layer = hidden_state(SPEC.sizes, layout, 2, sequence_parallel=True) * 8192
    assert _kept(SPEC, layout) == [24 * layer, 30 * layer, 40 * layer, 12 * layer]
    assert max(_kept(SPEC, layout)) > 1.6 * 48 / 4 * layer * 2  # of layers / pp on the third


def test_chunks_of_different_layers_count_with_their_mix() -> None:
    # Of the first stage 10 and 2 layers: (3, 2) and (4, 1) chunks are in flight in turn.
    layer = saved_by_layer(SPEC.sizes, Layout(), 0, 2, sequence_parallel=True, fused_experts=False)
    kept = _update(Layout(pp=2, vpp=2, stages=(10, 20, 2, 16)), config=TrainConfig(fused_experts=False))
    assert kept.activations == round((4 * 10 + 2) * layer * 8192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_delta_nets_save_what_is_predicted(dtype: torch.dtype) -> None:
    """Predicted bytes, without the inputs of norm and projection, against those that autograd keeps."""
    sizes = model_spec({**CONFIGS["qwen3_next"], "linear_key_head_dim": 64, "linear_value_head_dim": 96}).sizes
    delta = sizes.delta
    assert delta is not None
    tokens, channels = 4 * 64, 2 * delta.keys + delta.values

    def weight(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=dtype).requires_grad_()

    norm: Any = SimpleNamespace(eps=1e-6, weight=weight(delta.value_dim))
    net = SimpleNamespace(
        _delta=delta, _keys=delta.keys, _values=delta.values, _heads=delta.value_heads,
        conv1d=SimpleNamespace(weight=weight(channels, 1, delta.kernel)),
        A_log=weight(delta.value_heads), dt_bias=weight(delta.value_heads),
        out_norm=partial(GatedNorm.forward, norm),
    )  # fmt: skip
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    mixed = weight(tokens, channels + delta.values + 2 * delta.value_heads)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        GatedDeltaNet._attend(net, mixed, [0, 64, tokens])  # type: ignore[arg-type]
    measured = sum(storage.nbytes() for storage in saved.values()) / tokens
    linear, attention = (
        saved_by_layer(sizes, Layout(), layer, dtype.itemsize, sequence_parallel=False, fused_experts=False)
        for layer in (0, 3)
    )
    mlp = attention - saved_by_attention(sizes, Layout(), dtype.itemsize, sequence_parallel=False)
    assert linear - mlp - 2 * sizes.hidden * dtype.itemsize == pytest.approx(measured, rel=0.05)


def test_chunks_of_delta_nets_and_of_attention_keep_what_each_does() -> None:
    spec, config = model_spec(CONFIGS["qwen3_next"] | {"num_hidden_layers": 8}), TrainConfig()
    layout = Layout(pp=2, vpp=4)
    chunks = [_chunk_bytes(spec, layout, layers, config).kept for layers in spec.rules.rank_layers(layout, 1)]
    assert len({*chunks}) == 2
    kept = max(sum(map(mul, moment, chunks)) for moment in layout.in_flight(1))
    assert update_peak(spec, layout, layout.coordinates(1), config, tokens=4096).activations == round(kept * 4096)
