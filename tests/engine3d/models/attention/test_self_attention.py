"""Whole models whose queries and keys are made in one step, against Megatron-Core's steps."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from benchmarks.reshard_plan import named_model
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory import activations, update_peak
from engine3d.models import ModelSpec, build_model, load_model_spec, load_weights, model_spec
from engine3d.models.attention import self_attention
from engine3d.models.attention.requirements import check_fused_query_key
from engine3d.models.attention.self_attention import FusedSelfAttention, why_not_fused
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.megatron import parallel
from engine3d.training.megatron.settings import check_options
from tests.engine3d.training.test_engine import _engine, _gradients, _local_samples, _loss, _samples, _train
from tests.support import tiny_families
from tests.support.distributed import run_distributed

LAYERS = 4
STILL = OptimizerConfig(lr=1e-30, clip_grad=0)
RECOMPUTED = ("none", "none", "selective", "full")


class _Counted:
    """`normed_and_rotated`, and how often it was called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._function, self.calls = self_attention.normed_and_rotated, 0
        patch.setattr(self_attention, "normed_and_rotated", self)

    def __call__(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        return self._function(*arguments, **named)


def _pass(directory: Path, sizes: dict[str, int], world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and whole gradients of this rank's samples."""
    with pytest.MonkeyPatch.context() as patch:
        counted = _Counted(patch)
        engine = _engine(directory, sizes, world_size, optimizer=STILL, **settings)
        sequences, _ = _local_samples(_samples(), engine)
        outputs = engine.logprobs(sequences, with_entropy=True)
        inferred = counted.calls
        result = engine.update(sequences, _loss, with_entropy=True)
        assert len(result.loss_outputs) > 1 or not engine.config.packing  # several micro-batches
        results = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "gradients": _gradients(engine)}
        parameters = engine.module.named_parameters()
        marked = {name: getattr(parameter, "sequence_parallel", None) for name, parameter in parameters}
        engine.close()
    return results | {"calls": (inferred, counted.calls - inferred, len(result.loss_outputs)), "marked": marked}


def _with_and_without(directory: Path, sizes: dict[str, int], world_size: int, ways: list[dict[str, Any]]) -> None:
    """Assert that the option changes nothing but who makes queries and keys."""
    for settings in ways:
        apart, fused = (
            _pass(directory, sizes, world_size, settings | {"fused_query_key": option}) for option in (False, True)
        )
        passes = 2 if settings.get("recompute") == "full" else 1
        micro_batches = fused["calls"][2]
        assert apart["calls"][:2] == (0, 0)
        assert fused["calls"][:2] == (LAYERS * micro_batches, passes * LAYERS * micro_batches)
        assert fused["marked"] == apart["marked"]
        for name in ("logprobs", "entropy"):
            torch.testing.assert_close(fused[name], apart[name], rtol=1e-5, atol=1e-5)
        assert fused["gradients"].keys() == apart["gradients"].keys()
        for name, expected in apart["gradients"].items():
            largest = float(expected.abs().max())
            assert largest > 0, name
            torch.testing.assert_close(
                fused["gradients"][name],
                expected,
                rtol=1e-4,
                atol=1e-5 * largest,
                msg=partial("{}, {}: {}".format, settings, name),
            )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "ways"),
    [
        ("qwen3_moe", 1, [{"packing": False}, {"recompute": "full"}]),
        ("qwen3-biases", 2, [{}, {"packing": False, "recompute": "full"}, {"sequence_parallel": False}]),
        pytest.param("qwen3_moe", 1, [{}], marks=pytest.mark.release),
        pytest.param("qwen3-biases", 1, [{}, {"packing": False}, {"recompute": "full"}], marks=pytest.mark.release),
        pytest.param("qwen3_moe", 2, [{}, {"packing": False, "recompute": "full"}], marks=pytest.mark.release),
    ],
)
def test_a_model_is_the_same_with_it(name: str, ranks: int, ways: list[dict[str, Any]], tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    run_distributed(_with_and_without, ranks, tmp_path / "model", {"tp": ranks}, ranks, ways, timeout_s=300)


def _on_a_gpu(directory: Path) -> list[dict[str, Any]]:
    """Updates in Transformer Engine's steps, and fused ones that keep everything, or compute some of it again."""
    os.environ |= platform.training_environment(1, deterministic=True)
    ways: list[dict[str, Any]] = [{}, *[{"fused_query_key": True, "recompute": how} for how in RECOMPUTED]]
    return [_train(directory, {}, 1, dtype="bfloat16", deterministic=True, **way) for way in ways]


@pytest.mark.gpu
@pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3-biases"])
def test_a_model_on_a_gpu_learns_alike_with_it(name: str, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    [[apart, fused, *others]] = run_distributed(_on_a_gpu, 1, tmp_path / "model", timeout_s=300)
    assert fused["losses"] == pytest.approx(apart["losses"], rel=2e-3)
    assert fused["norms"] == pytest.approx(apart["norms"], rel=0.02)
    assert (fused["before"] - apart["before"]).abs().mean() < 0.01
    for other in others:
        assert other["losses"] == fused["losses"] and other["norms"] == fused["norms"]
        assert torch.equal(other["after"], fused["after"])


def _ways_apart(directory: Path) -> None:
    """Assert which calls take Megatron-Core's own steps, and that those of a fused layer are right."""
    layout, spec = Layout(), load_model_spec(directory)
    coordinates = parallel.initialise(layout, seed=1, timeout_s=300)
    model: Any = build_model(spec, layout, torch.float32, fused_query_key=True)
    load_weights(model, spec, layout, coordinates, directory)
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention, FusedSelfAttention)
    hidden = torch.randn(7, 2, spec.sizes.hidden, generator=torch.Generator().manual_seed(0))
    angles = model.rotary_pos_emb(7)
    with pytest.MonkeyPatch.context() as patch:
        counted = _Counted(patch)
        expected, _ = attention(hidden, None, rotary_pos_emb=angles)
        assert counted.calls == 1 and why_not_fused(attention, angles, None, {"attention_bias": None}) is None
        assert why_not_fused(attention, (angles, angles), PackedSeqParams(qkv_format="thd"), {}) is None
        apart: Any
        for apart in ((angles, angles.clone()), angles[..., :8]):
            made, _ = attention(hidden, None, rotary_pos_emb=apart)
            assert torch.allclose(made, expected, rtol=1e-5, atol=1e-5) == isinstance(apart, tuple)
        turned, _ = attention(hidden, None, rotary_pos_emb=angles * 0)
        assert counted.calls == 2
        torch.testing.assert_close(attention(hidden, None)[0], turned, rtol=1e-5, atol=1e-5)
        assert counted.calls == 2

        def wrong() -> tuple[Tensor, Tensor, Tensor]:
            raise RuntimeError

        patch.setattr(self_attention, "normed_and_rotated", lambda *_, **__: wrong())
        with pytest.raises(RuntimeError):
            attention(hidden, None, rotary_pos_emb=angles)
        assert attention._rotary is None  # nothing is left for the next call

    def why(rotary: Any = angles, packed: PackedSeqParams | None = None, **others: Any) -> str | None:
        return why_not_fused(attention, rotary, packed, others)

    assert why(None) == why((angles, None)) == "no rotary embedding"
    assert why((angles, angles + 0)) == "another rotary embedding for keys"
    assert (
        why(angles[..., :8])
        == why(angles.expand(7, 2, 1, 16))
        == "a rotary embedding of a part of a head, or of separate rows"
    )
    assert why(packed=PackedSeqParams(qkv_format="sbhd")) == "packing that is not thd"
    assert why(inference_context=object()) == "inference_context"
    for name, value, reason in (
        ("layernorm_zero_centered_gamma", True, "norms with weights around 0"),
        ("attention_output_gate", True, "an output gate"),
        ("rotary_interleaved", True, "interleaved rotary embedding"),
        ("no_rope_freq", [1, 0, 0, 0], "layers without rotary embedding"),
        ("num_query_groups", 0, "fewer groups than tp ranks"),
        ("test_mode", True, "a test of Megatron-Core's"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention.config, name, value)
            assert why() == reason
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_yarn_concentration_factor", 1.1)
        assert why() == "scaled rotary embedding"
    attention.k_layernorm = torch.nn.LayerNorm(16)
    assert why() == "norms that are no plain RMSNorm"
    parallel.release()


@pytest.mark.processes
def test_other_calls_take_megatron_cores_steps(tmp_path: Path) -> None:
    tiny_families.make("qwen3-biases", tmp_path / "model")
    run_distributed(_ways_apart, 1, tmp_path / "model", timeout_s=300)


def test_positions_of_packed_sequences_are_found_once() -> None:
    bounds, padded = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 2, 2, 5], [0, 3, 3, 7]))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    positions = self_attention._packed_positions(packed, 5)
    assert positions.dtype == torch.int32 and positions.tolist() == [0, 1, 0, 1, 2]
    assert self_attention._packed_positions(packed, 5) is positions
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_q_padded=padded)
    assert self_attention._packed_positions(packed, 7).tolist() == [0, 1, 2, 0, 1, 2, 3]
    bounds = torch.tensor([0, 8, 12], dtype=torch.int32)
    for cp_rank, expected in enumerate([[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]):
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
        assert self_attention._packed_positions(packed, 6, 2, cp_rank).tolist() == expected


QWEN = named_model("qwen3-30b-a3b")
ODD = dataclasses.replace(QWEN, sizes=dataclasses.replace(QWEN.sizes, head_dim=96))


@pytest.mark.parametrize(
    ("spec", "layout", "line"),
    [
        (model_spec(tiny_families.DEEPSEEK), Layout(), "DeepseekV3ForCausalLM has latent attention; expected false"),
        (
            named_model("llama-3-70b"),
            Layout(),
            "LlamaForCausalLM has no norms of single query and key heads; expected false",
        ),
        (ODD, Layout(), "head_dim=96 is no power of two, as the kernels need; expected false"),
        (QWEN, Layout(tp=8), "with tp=8: expected at most num_key_value_heads=4, or false"),
    ],
)
def test_what_it_cannot_be_used_with(spec: ModelSpec, layout: Layout, line: str) -> None:
    config = TrainConfig(fused_query_key=True)
    with pytest.raises(UserError, match=f"^fused_query_key=true:? {line}"):
        check_options(config, spec, layout, transformer_engine=True)
    check_options(TrainConfig(), spec, layout, transformer_engine=True)


def test_what_it_can_be_used_with() -> None:
    for spec, layout in (
        (QWEN, Layout(tp=4)),
        (QWEN, Layout(pp=2)),
        (QWEN, Layout(cp=2)),
        (model_spec(tiny_families.CONFIGS["qwen3-tied"]), Layout()),
    ):
        check_fused_query_key(spec, tp=layout.tp)


def _refused(directory: Path) -> list[str]:
    """Messages of an engine, and of a model that is built without one."""
    with pytest.raises(UserError) as of_engine:
        _engine(directory, {}, 1, fused_query_key=True)
    parallel.initialise(Layout(), seed=1, timeout_s=300)
    with pytest.raises(UserError) as of_model:
        build_model(load_model_spec(directory), Layout(), torch.float32, fused_query_key=True)
    parallel.release()
    return [str(of_engine.value), str(of_model.value)]


@pytest.mark.processes
def test_no_engine_is_built_of_a_model_without_norms(tmp_path: Path) -> None:
    tiny_families.make("llama", tmp_path / "model")
    [messages] = run_distributed(_refused, 1, tmp_path / "model", timeout_s=300)
    for message in messages:
        assert message.startswith("fused_query_key=true: LlamaForCausalLM has no norms of single query and key heads")


def test_a_layer_keeps_its_values_twice() -> None:
    sizes, layout = QWEN.sizes, Layout(tp=2)
    arguments: dict[str, Any] = {"layer": 0, "itemsize": 2, "sequence_parallel": True, "fused_experts": True}
    apart, fused = (
        activations.saved_by_layer(sizes, layout, **arguments, fused_query_key=option) for option in (False, True)
    )
    assert fused - apart == 2 * 2 * 128
    peaks = [
        update_peak(QWEN, layout, layout.coordinates(0), TrainConfig(fused_query_key=option), tokens=1000)
        for option in (False, True)
    ]
    assert peaks[1].activations - peaks[0].activations == 48 * 1000 * 2 * 2 * 128
