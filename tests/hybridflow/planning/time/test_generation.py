"""Seconds of generation: waves, tails, rooflines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.models.precision import Fp8Settings
from hybridflow.planning.time.generation import EngineShape, GenerationModel
from hybridflow.planning.time.hardware import load_profile

HARDWARE = load_profile("h200").hardware
MODEL = GenerationModel(named_model("qwen3-30b-a3b"), HARDWARE)
MANY = 1e15
"""Tokens of a KV cache that bounds nothing."""


@pytest.mark.slow
def test_weights_are_the_models() -> None:
    one = MODEL.weights(EngineShape())
    assert one == pytest.approx(2 * MODEL.spec.parameter_count(), rel=0.001)
    assert MODEL.weights(EngineShape(tp=4, ep=4)) == pytest.approx(one / 4)
    assert one / 4 < MODEL.weights(EngineShape(tp=4, ep=4, attention_dp=4)) < one / 3
    assert MODEL.weights(EngineShape(fp8=True)) < 0.6 * one
    half = replace(MODEL, spec=Fp8Settings(num_layers_at_end_in_bf16=24).applied(MODEL.spec))
    assert half.weights(EngineShape()) == one
    assert half.weights(EngineShape(fp8=True)) == pytest.approx((one + MODEL.weights(EngineShape(fp8=True))) / 2)


def test_requests_of_one_length_come_in_waves() -> None:
    once, twice = (MODEL.rollout(EngineShape(requests=requests), 64, 8, 1024, [512], MANY) for requests in (512, 256))
    assert (once.steps, twice.steps) == (512, 1024) and twice.seconds > once.seconds
    assert once.tail == 0.0
    # A KV cache with room for half of the requests, of which eight share a prompt, has half of them at once.
    assert MODEL.rollout(EngineShape(requests=512), 64, 8, 1024, [512], 256 * (1024 / 8 + 512)).steps == 1024


def test_a_long_tail_takes_as_many_steps_as_its_longest() -> None:
    even = MODEL.rollout(EngineShape(requests=512), 64, 8, 256, [512], MANY)
    tailed = MODEL.rollout(EngineShape(requests=512), 64, 8, 256, [256] * 15 + [4352], MANY)
    assert tailed.steps == 4352 and tailed.tail > 0.5 * tailed.seconds
    assert tailed.seconds > even.seconds  # of as many tokens


def test_a_decoding_step_reads_weights_once_and_each_requests_cache() -> None:
    cheap = GenerationModel(MODEL.spec, replace(HARDWARE, decode_layer_s=0.0, decode_host_s=0.0, decode_request_s=0.0))
    few, many = (cheap.step(EngineShape(), 256, tokens) for tokens in (1e5, 2e5))
    assert many["cache"] == pytest.approx(2 * few["cache"]) and many["weights"] == few["weights"]
    of_token = 48 * 4 * 2 * 128 * 2
    assert few["cache"] == pytest.approx(1e5 * of_token / (HARDWARE.memory_rate * HARDWARE.decode_read))
    idle = cheap.step(EngineShape(), 1, 1e5)["weights"]
    assert idle < 0.2 * few["weights"]  # one token has eight of 128 experts
    assert few["exchange"] == 0.0 < cheap.step(EngineShape(tp=2, ep=2), 256, 1e5)["exchange"]


def test_shared_prompts_are_read_less() -> None:
    apart = MODEL.step(EngineShape(), 256, 3e5)["cache"]
    shared = MODEL.step(EngineShape(), 256, 3e5, 2e5)["cache"]
    assert MODEL.step(EngineShape(cascade=True), 256, 3e5, 2.7e5)["cache"] < shared < apart
