"""Lower bound of the bytes that a step of decoding reads."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from benchmarks.reshard_plan import Rollout, named_model
from benchmarks.rollout import Case, decode_figures, decoded_at_once
from benchmarks.roofline import decode_bytes, memory_bandwidth
from engine3d.models import ModelSpec, model_spec
from engine3d.platform import platform
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.config import RolloutConfig

_BF16 = 2


def _two_layers() -> ModelSpec:
    return model_spec(dict(named_model("qwen3-30b-a3b").hf_config) | {"num_hidden_layers": 2})


def _bytes_of(spec: ModelSpec, *names: str) -> int:
    named = spec.hf_tensors.items()
    return _BF16 * sum(prod(tensor.shape) for name, tensor in named if any(fragment in name for fragment in names))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
def test_a_step_reads_weights_and_cache_once(tp: int) -> None:
    spec, config = _two_layers(), RolloutConfig(tp=tp, ep=tp, dtype="bfloat16")
    read = decode_bytes(spec, Rollout(tp=tp, ep=tp), config, requests=1024, prompt=1000, response=99)
    # All 128 experts are read; what is not cut over ranks is small.
    weights = _bytes_of(spec, "layers.", "lm_head", "model.norm")
    assert read.weights == pytest.approx(weights / tp, rel=2e-3 * tp)
    assert read.weights > weights / tp * (1 - 1e-9)
    head_bytes = 2 * 2 * 128 * _BF16  # of keys and values in both layers
    assert read.cache == 1024 * 1050 * (4 // tp) * head_bytes
    assert read.step == read.weights + read.cache
    # A prompt that eight of them have in common is read once.
    eighth = decode_bytes(spec, Rollout(tp=tp, ep=tp), config, requests=1024, prompt=1000, response=99, samples=8)
    assert eighth.cache == 1024 * (1000 // 8 + 50) * (4 // tp) * head_bytes


def test_experts_that_no_token_is_sent_to_are_not_read() -> None:
    spec, config = _two_layers(), RolloutConfig(dtype="bfloat16")
    experts = _bytes_of(spec, ".experts.")
    one, many = (
        decode_bytes(spec, Rollout(), config, requests=requests, prompt=1, response=1).weights
        for requests in (1, 10_000)
    )
    assert many - one == pytest.approx(experts * (1 - 8 / 128), rel=1e-6)


@pytest.mark.slow
def test_experts_in_fp8_have_half_the_bytes() -> None:
    spec = _two_layers()
    full, fp8 = (
        [
            decode_bytes(
                spec, Rollout(), RolloutConfig(dtype="bfloat16", precision=precision), requests=n, prompt=1, response=1
            ).weights
            for n in (1, 10_000)
        ]
        for precision in (None, "fp8")
    )
    assert fp8[1] - fp8[0] == pytest.approx((full[1] - full[0]) / 2, rel=1e-6)
    quantised = _bytes_of(spec, "_proj.weight")
    assert full[1] - fp8[1] == pytest.approx(quantised / 2, rel=1e-3)


def _case(directory: Path, *, requests: int, running: int) -> Case:
    (directory / "config.json").write_text(json.dumps(_two_layers().hf_config))
    config = RolloutConfig(dtype="bfloat16", max_running_requests=running)
    return Case(directory, Rollout(), config, [[[1] * 100] * requests], 50, 1)


def test_a_round_is_as_many_steps_as_tokens(tmp_path: Path) -> None:
    case = _case(tmp_path, requests=8, running=8)
    stats = decode_figures(case, 1e12, {"engine": 0.5, "sglang": 1.0})
    least_ms = (stats["weights_bytes"] + stats["cache_bytes"]) / 1e9
    assert stats["bandwidth_gb_s"] == 1000 and stats["least_step_ms"] == pytest.approx(least_ms)
    assert stats["engine"] == {"step_ms": 10.0, "of_roofline": pytest.approx(least_ms / 10)}
    assert stats["sglang"] == {"step_ms": 20.0, "of_roofline": pytest.approx(least_ms / 20)}


@pytest.mark.parametrize(("running", "too_few", "expected"), [(8, 0, True), (7, 0, False), (8, 1, False), (9, 0, True)])
def test_no_bound_is_told_of_requests_that_wait(running: int, too_few: int, expected: bool, tmp_path: Path) -> None:
    page_tokens = PAGE_TOKENS[platform.device_type]
    needed = tokens_needed(requests=8, sequence_tokens=150, page_tokens=page_tokens)
    assert decoded_at_once(_case(tmp_path, requests=8, running=running), needed - too_few) == expected


@pytest.mark.processes
def test_the_memorys_bandwidth_is_measured() -> None:
    assert 1e8 < memory_bandwidth() < 1e14
