"""Seconds of an update, by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.layout import Layout
from engine3d.models.lora.config import LoraConfig
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.flops import sequence_flops, token_flops
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.training import Batch, CostModel, distinct_stages

SPEC = named_model("qwen3-30b-a3b")
SHARE = 0.5
"""Share of the peak that all products reach here."""
HARDWARE = replace(
    load_profile("h200").hardware,
    linear=SHARE,
    linear_half=0.0,
    experts=SHARE,
    unfused_experts=SHARE,
    attention=SHARE,
    memory_rate=1e30,
    node_rate=390e9,
    layer_s=1e-3,
    sparse_layer_s=1e-3,
    unfused_layer_s=1e-3,
    message_s=0.0,
    update_s=0.0,
)
COSTS = CostModel(SPEC, HARDWARE)
NO_COMPUTE = CostModel(SPEC, replace(HARDWARE, flops=1e30, layer_s=0.0, sparse_layer_s=0.0, unfused_layer_s=0.0))
PLAIN, FULL = TrainConfig(), TrainConfig(recompute="full")
BATCH = Batch(sequences=8, tokens=32768)
KEYS_AND_VALUES = 4 * 2 * 128 * 2
"""Bytes of a token in a layer."""


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "kimi-k2"])
def test_the_layers_costs_are_the_models_multiplications(name: str) -> None:
    spec = named_model(name)
    assert 2 * (sum(spec.rules.layer_costs) + spec.rules.head_cost) == token_flops(spec)


def test_one_rank_multiplies_and_nothing_else() -> None:
    cost = COSTS.update(Layout(), PLAIN, BATCH)
    flops = 3 * 8 * float(sequence_flops(SPEC, 32768))
    products = cost.linear + cost.experts + cost.attention
    assert products == pytest.approx(flops / (HARDWARE.flops * SHARE))
    assert cost.seconds == cost.compute == pytest.approx(1.05 * products)  # a twentieth of the time is idle
    assert COSTS.utilisation(Layout(), cost, BATCH) == pytest.approx(SHARE / 1.05)
    again = COSTS.update(Layout(), FULL, BATCH)
    head = 2 * SPEC.rules.head_cost * 32768 * 8 / (HARDWARE.flops * SHARE)  # is not computed again
    assert again.linear + again.experts + again.attention == pytest.approx((products / 3 * 4) - head)


def test_a_forward_pass_is_a_third_of_an_update() -> None:
    update, forward = COSTS.update(Layout(dp=2), PLAIN, BATCH), COSTS.forward(Layout(dp=2), PLAIN, BATCH)
    assert forward.linear == pytest.approx(update.linear / 3) and forward.experts == pytest.approx(update.experts / 3)
    assert forward.gradients == forward.optimizer == 0.0 and forward.call > 0


def test_frozen_weights_have_no_gradients() -> None:
    adapted = TrainConfig(lora=LoraConfig(targets=("q_proj", "o_proj")))
    one, other = (COSTS.update(Layout(dp=2), config, BATCH) for config in (PLAIN, adapted))
    assert other.attention == one.attention and other.linear == pytest.approx(one.linear * 2 / 3)
    elements = 48 * 16 * 2 * (2048 + 4096)
    # Gradients, masters and moments in float32; gradients and weights of two copies are exchanged.
    assert other.optimizer == pytest.approx(elements / 2 * (4 + 2 * (2 + 4 + 8)) / (1e30 * HARDWARE.adam))
    assert 0 < other.gradients == pytest.approx(one.gradients * elements / sum(COSTS.elements(Layout(), 0)), rel=1e-2)


def test_kernel_classes_have_rates_of_their_own() -> None:
    cost = COSTS.update(Layout(), PLAIN, BATCH)
    slower = CostModel(SPEC, replace(HARDWARE, linear=SHARE / 2, experts=SHARE / 4, attention=SHARE / 8))
    scaled = slower.update(Layout(), PLAIN, BATCH)
    assert scaled.linear == pytest.approx(2 * cost.linear) and scaled.experts == pytest.approx(4 * cost.experts)
    assert scaled.attention == pytest.approx(8 * cost.attention)
    narrow = CostModel(SPEC, replace(HARDWARE, linear_half=2048.0)).update(Layout(), PLAIN, BATCH)
    assert narrow.linear == pytest.approx(2 * cost.linear)


def test_an_offloaded_optimizer_waits_for_its_state() -> None:
    offloaded = TrainConfig(optimizer=OptimizerConfig(precision_aware=True, offload=True))
    cost = COSTS.update(Layout(), offloaded, BATCH)
    elements = sum(COSTS.elements(Layout(), 0))
    assert cost.optimizer == pytest.approx(elements * 6 / HARDWARE.host_rate)  # moments, and 16 bits of the masters
    four = COSTS.update(Layout(dp=4, ep=4), offloaded, BATCH)
    assert four.optimizer == pytest.approx(elements / 4 * 6 / (HARDWARE.node_host_rate / 4), rel=0.01)


def test_a_short_micro_batch_takes_as_long_as_its_launches() -> None:
    short = COSTS.update(Layout(), PLAIN, Batch(sequences=8, tokens=64))
    assert short.compute == pytest.approx(8 * 3 * 48 * HARDWARE.layer_s)


def test_context_parallel_ranks_share_a_sequence() -> None:
    one, four = (COSTS.update(Layout(cp=cp), PLAIN, BATCH) for cp in (1, 4))
    assert four.experts == pytest.approx(one.experts / 4) and four.attention == pytest.approx(one.attention / 4)
    assert four.context == 0.0  # keys and values arrive while attention computes
    # Three rounds of a ring: keys and values, these again and their gradients.
    ring = 48 * 3 * KEYS_AND_VALUES * 32768 / 4 * 3
    assert NO_COMPUTE.update(Layout(cp=4), PLAIN, BATCH).context == pytest.approx(8 * ring / HARDWARE.node_rate)
    far = NO_COMPUTE.update(Layout(cp=4, tp=4), PLAIN, BATCH).context
    assert far == pytest.approx(8 * ring / 4 / HARDWARE.network_rate)
    # As many sequences as ranks are not split.
    for together, is_split in ((2, True), (4, False), (6, True), (8, False)):
        batch = Batch(sequences=24, tokens=32768, together=together)
        assert (NO_COMPUTE.update(Layout(cp=4), PLAIN, batch).context > 0) == is_split


@pytest.mark.parametrize(
    "layout", [Layout(pp=4), Layout(pp=4, dp=2), Layout(pp=4, vpp=2), Layout(pp=4, vpp=4, cp=2), Layout(pp=2, vpp=6)]
)
def test_the_bubble_is_what_a_pipeline_waits(layout: Layout) -> None:
    cost = COSTS.update(layout, PLAIN, BATCH)
    work = cost.compute + cost.tensor + cost.expert + cost.context + cost.pipeline
    micro_batches = -(-8 // layout.dp)
    assert cost.bubble == pytest.approx(work * (layout.pp - 1) / (layout.vpp * micro_batches))


def test_a_group_of_micro_batches_is_filled_for_virtual_stages() -> None:
    batch = Batch(sequences=9, tokens=1024)
    assert [batch.micro_batches(Layout(pp=4, vpp=vpp)) for vpp in (1, 2)] == [9, 12]
    assert Batch(9, 1024, together=4).micro_batches(Layout(dp=2)) == 2


def test_exchanges_by_hand() -> None:
    # Seven of 15 others are on the node, eight are not.
    assert HARDWARE.exchange_s(15e9, 16) == pytest.approx(max(7e9 / 390e9, 8e9 / 45e9))
    assert HARDWARE.exchange_s(15e9, 16, stride=8) == pytest.approx(15e9 / 45e9)
    assert HARDWARE.exchange_s(7e9, 8) == pytest.approx(7e9 / 390e9)
    assert replace(HARDWARE, message_s=10e-6).exchange_s(0.0, 8, times=3) == pytest.approx(3 * 7 * 10e-6)
    hidden = 32768 * 2048 * 2
    expert = NO_COMPUTE.update(Layout(ep=8, cp=8), PLAIN, BATCH).expert
    assert expert == pytest.approx(8 * 48 * 2 * 2 * (hidden / 8) * 8 * 7 / 8 / HARDWARE.node_rate)
    tensor = NO_COMPUTE.update(Layout(tp=2), PLAIN, BATCH).tensor
    assert tensor == pytest.approx(8 * 48 * 2 * 2.5 * hidden / 2 / HARDWARE.node_rate)


def test_gradients_are_summed_over_context_parallel_ranks_too() -> None:
    data, context = (NO_COMPUTE.update(layout, PLAIN, BATCH).gradients for layout in (Layout(dp=4), Layout(cp=4)))
    assert data == context > 0


def test_the_busiest_stage_decides() -> None:
    even, uneven = (COSTS.update(Layout(pp=2, stages=stages), PLAIN, BATCH) for stages in ((24, 24), (8, 40)))
    assert uneven.compute > 1.5 * even.compute
    assert {field.name for field in fields(even)} >= {"context", "bubble"}
    assert distinct_stages(SPEC, Layout(pp=4, stages=(12, 12, 12, 12))) == [0, 1, 3]
