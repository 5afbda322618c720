"""Predicted memory of a rank, from shapes alone, against engines and measured runs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reshard_plan import named_model, parse_layout
from engine3d.layout import Layout
from engine3d.memory import ResidentBytes, activations, inference_peak, resident_by_rank, serving_by_rank, update_peak
from engine3d.memory.serving import (
    absorbed_weights,
    cache_of_a_token,
    prefix_of_a_token,
    prompt_of_a_token,
    prompt_tokens,
)
from engine3d.models import ModelSpec, load_model_spec, model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.rules import local_parameters
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.describe.source import buffer_rules, parameter_buffers, planned_shards, unpadded_elements
from engine3d.rollout.config import RolloutConfig
from engine3d.training.config import MtpConfig, OptimizerConfig, TrainConfig
from tests.engine3d.checkpoint.writing.test_save import build_engine, update
from tests.support import tiny_families
from tests.support.distributed import run_distributed

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def _measure_engine(
    directory: Path, sizes: dict[str, int], lora: LoraConfig | None, mtp: MtpConfig | None
) -> tuple[ResidentBytes, ResidentBytes]:
    """Resident and predicted memory of an engine's rank after an update."""
    engine = build_engine(directory, sizes, lora=lora, mtp=mtp)
    update(engine, 1)
    buffers = [
        buffer for chunk in engine.gradient_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    parameters = {id(parameter) for buffer in buffers for parameter in buffer.params}
    others = [weight for _, weight in engine.weighted.named_parameters() if id(weight) not in parameters]
    others += [buffer for name, buffer in engine.weighted.named_buffers() if name.endswith("expert_bias")]
    state = [
        tensor
        for optimizer in engine.optimizers
        for inner in getattr(optimizer, "chained_optimizers", [optimizer])
        for group in inner.optimizer.state.values()
        for tensor in group.values()
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
    ]
    resident = ResidentBytes(
        weights=_nbytes([buffer.param_data for buffer in buffers] + others),
        gradients=_nbytes([buffer.grad_data for buffer in buffers]),
        optimizer=_nbytes(state),
    )
    config = TrainConfig(dtype="float32", lora=lora, mtp=mtp)
    predicted = resident_by_rank(engine.spec, engine.layout, engine.coordinates, config, transformer_engine=False)
    engine.close()
    return resident, predicted


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "lora", "mtp"),
    [
        ("qwen2_moe", None, None),
        ("qwen2-tied", None, None),
        ("deepseek_v3", None, None),
        ("deepseek_v3", LoraConfig(rank=8), None),
        ("deepseek_v3", None, MtpConfig()),
    ],
)
def test_resident_bytes_of_an_engine_are_predicted(
    name: str, lora: LoraConfig | None, mtp: MtpConfig | None, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    tiny_families.make(name, directory)
    if mtp is not None:
        tiny_families.add_drafting_layer(directory)
    layouts: list[dict[str, int]] = [{"tp": 2, "pp": 2}] if name == "qwen2-tied" else [{"tp": 2, "ep": 4, "etp": 1}]
    for sizes in layouts:
        for resident, predicted in run_distributed(_measure_engine, 4, directory, sizes, lora, mtp, timeout_s=200):
            assert (resident.weights, resident.gradients) == (predicted.weights, predicted.gradients)
            # The optimizer's shard of a buffer has its share of the padding, which has no state.
            assert 0.95 * predicted.optimizer <= resident.optimizer <= predicted.optimizer


def _with_layers(name: str, layers: int, directory: Path) -> ModelSpec:
    """A published model that has fewer layers."""
    (directory / "config.json").write_text(json.dumps(named_model(name).hf_config | {"num_hidden_layers": layers}))
    return load_model_spec(directory)


def _measured(name: str) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((RESULTS / "train" / name).read_text())
    return measured


@pytest.mark.parametrize(
    ("name", "fused_experts"),
    [
        ("h200-2gpu-16-layers-no-cutlass.json", False),
        ("h200-2gpu-24-layers-megatron-experts.json", False),
        ("h200-2gpu-24-layers-router-fusion.json", True),
    ],
)
def test_the_peak_of_an_update_on_gpus_was_foreseen(name: str, fused_experts: bool, tmp_path: Path) -> None:
    measured = _measured(name)
    words = measured["command"].split()
    option = dict(itertools.pairwise(words))
    spec = _with_layers(option["--model"], int(option["--layers"]), tmp_path)
    layout = parse_layout(option["--train"])
    config = TrainConfig(
        optimizer=OptimizerConfig(precision_aware="--precision-aware" in words),
        fused_experts=fused_experts,
        megatron=json.loads(option.get("--megatron", "{}")),
    )
    assert config.has_fused_experts(spec.sizes, layout) == fused_experts
    peaks = []
    for _, at in layout.ranks():
        working = update_peak(spec, layout, at, config, tokens=int(option["--micro-batch-tokens"]))
        peaks.append(resident_by_rank(spec, layout, at, config).total + working.peak)
    assert max(peaks) == pytest.approx(measured["peak_memory_bytes"], rel=0.03)


def test_a_gate_keeps_what_it_scales() -> None:
    sizes = model_spec(tiny_families.CONFIGS["qwen2_moe"]).sizes
    arguments: dict[str, Any] = {"layer": 0, "itemsize": 2, "sequence_parallel": True, "fused_experts": False}
    with_gate, without = (
        activations.saved_by_layer(of_gate, Layout(tp=2), **arguments)
        for of_gate in (sizes, replace(sizes, shared_gate=False))
    )
    assert with_gate - without == 2 * (32 + 1) / 2  # of each token the output of the shared expert and the gate


@pytest.mark.parametrize(
    ("ep", "kept_less", "gradients", "made"),
    [
        # Of 8 experts' tokens and activations, 8 * (2048 + 3 * 768 - 2 * 768) elements, and a score; more are 8 rows of
        # 16 bytes for each of the ranks, and 9 numbers of 4.
        (1, 2 * 8 * (2048 + 768) + 4 * 8 - 164, 2 * (2048 + 8 * (2048 + 4 * 768)), 2 * 8 * (2048 + 768)),
        (4, 2 * 8 * (2048 + 768) + 4 * 8 - 656, 2 * (4 * 2048 + 8 * (2048 + 4 * 768)), 2 * (8 * 2048 + 4 * 2048)),
        (16, 2 * 8 * (2048 + 768) + 4 * 8 - 2624, 2 * (32 * 2048 + 8 * (2048 + 2 * 768)), 2 * (8 * 2048 + 16 * 2048)),
    ],
)
def test_bytes_of_a_token_with_fused_experts(ep: int, kept_less: int, gradients: int, made: int) -> None:
    sizes, layout = named_model("qwen3-30b-a3b").sizes, Layout(ep=ep, dp=ep)
    arguments: dict[str, Any] = {"layer": 0, "itemsize": 2, "sequence_parallel": True}
    saved = [activations.saved_by_layer(sizes, layout, **arguments, fused_experts=fused) for fused in (False, True)]
    assert saved[0] - saved[1] == kept_less
    with_capacity = activations.saved_by_layer(sizes, layout, **arguments, fused_experts=True, capacity=17 / 16)
    assert with_capacity - saved[1] == 2 * 8 * 2 * 768 / 16
    config = TrainConfig(megatron={"moe_token_dispatcher_type": "allgather"})
    ahead, spec = config.model_copy(update={"predicted_expert_capacity": True}), named_model("qwen3-30b-a3b")
    for peak in (update_peak, inference_peak):
        one, more = (peak(spec, layout, layout.coordinates(0), settings, tokens=1600) for settings in (config, ahead))
        # One rank with all experts knows how many there are.
        assert one.layer < more.layer <= one.layer * 17 / 16 + 1 if ep > 1 else one == more
    assert activations.gradients_of_layer(sizes, layout, **arguments, fused_experts=True) == gradients
    assert activations.made_by_experts(sizes, layout, **arguments) == made


def test_what_a_token_takes_of_balance_losses() -> None:
    spec, layout = named_model("qwen3-30b-a3b"), Layout(tp=2)
    plain, balanced = (
        update_peak(spec, layout, layout.coordinates(0), TrainConfig(megatron=options), tokens=1000)
        for options in ({"moe_z_loss_coeff": 0.001}, {"moe_aux_loss_coeff": 0.001})
    )
    # Half of the tokens are this rank's; of each a score and a weight for every expert of 48 layers, in float32.
    assert balanced.activations - plain.activations == 500 * 48 * 128 * 2 * 4


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("qwen3_moe", 1, 4 * 2 * (16 + 16) * 2),  # layers, key heads, keys and values, bf16
        ("qwen3_moe", 4, 4 * 1 * (16 + 16) * 2),
        ("deepseek_v3", 1, 4 * (16 + 8) * 2),  # layers, latent and turned elements, bf16
        ("deepseek_v3", 4, 4 * (16 + 8) * 2),
    ],
)
def test_what_a_token_takes_in_the_cache(name: str, tp: int, expected: int, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path)
    assert cache_of_a_token(load_model_spec(tmp_path).sizes, tp, 2) == expected


@pytest.mark.parametrize(
    ("name", "tp", "prefix", "absorbed"),
    [
        ("qwen3_moe", 1, 0, 0),
        # The latent and its turned part, then for each head its key twice, of which once with the turned part, and its
        # value; and for each layer and head, keys and values from the latent.
        ("deepseek_v3", 1, 2 * (16 + 8 + 4 * (16 + 12 + 24)), 2 * 4 * 4 * (16 + 12) * 16),
        ("deepseek_v3", 4, 2 * (16 + 8 + 16 + 12 + 24), 2 * 4 * (16 + 12) * 16),
    ],
)
def test_what_a_latent_is_made_into(name: str, tp: int, prefix: int, absorbed: int, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path)
    sizes = load_model_spec(tmp_path).sizes
    assert (prefix_of_a_token(sizes, tp, 2), absorbed_weights(sizes, tp, 2)) == (prefix, absorbed)


@pytest.mark.parametrize(
    ("model", "tp", "ep", "elements"),
    [
        ("llama-3-70b", 1, 1, 2 * 8192 + 3 * 28672),
        ("llama-3-70b", 4, 1, 2 * 8192 + 3 * 7168),
        # What eight experts give is of the whole width on every rank, and so is what is in them if experts are not cut.
        ("qwen3-30b-a3b", 1, 1, 2 * 2048 + 8 * (3 * 768 + 2048)),
        ("qwen3-30b-a3b", 4, 1, 2 * 2048 + 8 * (3 * 192 + 2048)),
        ("qwen3-30b-a3b", 4, 4, 2 * 2048 + 8 * (3 * 768 + 2048)),
        # Wider than its first three layers, which are dense, and with a shared expert.
        ("deepseek-v3", 8, 8, 2 * 7168 + 8 * (3 * 2048 + 7168) + 3 * 256),
    ],
)
def test_the_widest_layer_takes_most_of_a_prompt(model: str, tp: int, ep: int, elements: int) -> None:
    assert prompt_of_a_token(named_model(model).sizes, tp, ep, 2) == 2 * elements


@pytest.mark.parametrize(
    ("gpu_gb", "arguments", "tokens"),
    [
        (25.8, {}, 2048),
        (51.5, {}, 4096),
        (85.5, {}, 8192),
        (150.7, {}, 8192),
        (192.0, {}, 16384),
        (150.7, {"chunked_prefill_size": 512}, 512),
        (150.7, {"chunked_prefill_size": -1}, 16384),
        (150.7, {"chunked_prefill_size": -1, "max_prefill_tokens": 99}, 99),
    ],
)
def test_prompts_are_read_as_the_engine_is_told(gpu_gb: float, arguments: dict[str, int], tokens: int) -> None:
    assert prompt_tokens(RolloutConfig(server_args=arguments), round(gpu_gb * 1e9)) == tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_a_dummy_gradient_is_resident_for_each_shape_of_a_linear_layer(tp: int, tmp_path: Path) -> None:
    spec = _with_layers("qwen3-30b-a3b", 2, tmp_path)
    layout, config = Layout(tp=tp), TrainConfig(dtype="bfloat16")
    resident, *others = (
        resident_by_rank(spec, layout, layout.coordinates(0), config, **less)
        for less in ({}, {"trainable": False}, {"transformer_engine": False})
    )
    sizes = spec.sizes
    qkv = (sizes.heads + 2 * sizes.groups) * sizes.head_dim * sizes.hidden
    projection = sizes.heads * sizes.head_dim * sizes.hidden
    assert resident.dummy_gradients == 2 * (qkv + projection) // tp  # both layers' are alike
    assert [other.dummy_gradients for other in others] == [0, 0]


def test_an_engine_shares_what_is_the_same_on_its_device(tmp_path: Path) -> None:
    spec = _with_layers("qwen3-30b-a3b", 2, tmp_path)
    here, there = Location("node 0", "cuda:0"), Location("node 0", "cuda:1")
    source = planned_shards(spec, Layout(), 0, here, torch.bfloat16)
    beside, away = serving_by_rank(spec, RolloutConfig(dtype="bfloat16"), [here, there], [source])
    assert beside.weights == away.weights == 2 * spec.parameter_count()
    assert away.shared == 0
    # All but queries, keys and values, which Megatron-Core lays out by group of heads.
    sizes = spec.sizes
    rows = (sizes.heads + 2 * sizes.groups) * sizes.head_dim
    assert beside.weights - beside.shared == 2 * sizes.layers * sizes.hidden * rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("layout", ["tp=2,dp=3", "tp=2,pp=4,ep=8,dp=8", "pp=2,vpp=2,ep=2,etp=2,tp=4,dp=2"])
def test_buffers_without_padding_between_parameters_are_counted_from_the_experts_of_a_layer_at_once(
    name: str, layout: str
) -> None:
    spec, parsed = named_model(name), parse_layout(layout)
    if not spec.sizes.experts:
        parsed = replace(parsed, ep=1, etp=1)
    at = parsed.coordinates(parsed.world_size - 1)
    listed = 0
    for rules, copies in zip(buffer_rules(spec.rules, parsed), (parsed.dp * parsed.cp, parsed.edp), strict=True):
        if rules is not None:
            one_by_one, at_once = (
                local_parameters(rules, parsed, at, transformer_engine=True, each_expert=one) for one in (True, False)
            )
            exact = sum(buffer.elements for buffer in parameter_buffers(one_by_one, copies, tied=False))
            assert unpadded_elements([local for local in at_once if not local.buffer], copies) == exact
            assert sum(local.count for local in at_once) == len(one_by_one)
            listed += exact
    assert listed > 0
