"""Transfers into engines in fp8: the bits that SGLang loads of an export in fp8, and log-probs of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.logprobs import dequantised
from engine3d.models import initialise_random, load_model_spec, model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings, served_tensors
from engine3d.rollout import RolloutConfig, RolloutEngine, SamplingConfig
from tests.support.engine_responses import responses_of, versions_of
from tests.support.proves import proves, runs_of
from tests.support.published_fp8 import publish
from tests.support.tiny_families import FP8_CONFIGS
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import TrainerRanks, trainer_ranks
from tests.support.transfers import connect, differences, locations, started

pytestmark = pytest.mark.processes

NONE: Mapping[str, Fp8Settings] = {}
ENGINES: dict[str, dict[str, Any]] = {
    "qwen3": {"tp": 2},
    "qwen3_moe": {"tp": 2, "ep": 2},
    "deepseek_v3": {"tp": 1},
}
MORE_ENGINES: dict[str, dict[str, Any]] = {
    "qwen2": {"tp": 1},
    "qwen2_moe": {"tp": 2, "ep": 2},
    "mixtral": {"tp": 1},
    "glm4_moe": {"tp": 2},
}
"""Engines of further families, in tests before a release."""
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "bfloat16", {"tp": 2}),
    ("qwen3", "float32", {"pp": 2, "vpp": 2}),
    ("qwen3_moe", "bfloat16", {"tp": 2, "etp": 2}),
    ("deepseek_v3", "bfloat16", {"ep": 2}),
]
MORE_LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "bfloat16", {"tp": 2}),
    ("qwen3", "bfloat16", {"cp": 2}),
    ("qwen3_moe", "bfloat16", {"ep": 2}),
    ("deepseek_v3", "bfloat16", {"tp": 2}),
    ("deepseek_v3", "float32", {"pp": 2, "stages": (3, 1)}),
    ("qwen2_moe", "bfloat16", {"tp": 2, "etp": 2}),
    ("mixtral", "bfloat16", {"ep": 2}),
    ("glm4_moe", "bfloat16", {"tp": 2, "ep": 2}),
]
LEFT_OUT = {
    "qwen3_moe": Fp8Settings(num_layers_at_end_in_bf16=1),
    "deepseek_v3": Fp8Settings(num_layers_at_start_in_bf16=1, shared_experts_in_bf16=True),
}
"""Matrices that stay in bfloat16 in some tests."""
LEFT_OUT_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"tp": 2, "etp": 2}),
    ("deepseek_v3", {"ep": 2}),
]
MORE_LEFT_OUT_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("deepseek_v3", {"tp": 2}),
    ("deepseek_v3", {"pp": 2, "stages": (3, 1)}),
]
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
IN_FP8 = TINY_ROLLOUT.model_copy(
    update={"precision": "fp8", "dtype": "bfloat16", "server_args": {"load_format": "dummy"}}
)
GREEDY = SamplingConfig(temperature=0, max_new_tokens=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("fp8")
    for name in ENGINES | MORE_ENGINES:
        # SGLang builds experts in every layer of Qwen3-MoE.
        config = {**FP8_CONFIGS[name], "num_hidden_layers": 4, "mlp_only_layers": []}
        initialise_random(model_spec(config), directory / name, seed=3, dtype=torch.bfloat16)
    return {name: directory / name for name in ENGINES | MORE_ENGINES}


@contextmanager
def started_in_fp8(
    models: dict[str, Path], sizes: dict[str, dict[str, Any]], left_out: Mapping[str, Fp8Settings] = NONE
) -> Iterator[dict[str, RolloutEngine]]:
    engines = [
        RolloutEngine(models[name], IN_FP8.model_copy(update=of_engine), fp8=left_out.get(name, NOTHING_LEFT_OUT))
        for name, of_engine in sizes.items()
    ]
    with started(engines):
        yield dict(zip(sizes, engines, strict=True))


@pytest.fixture(scope="module")
def some_engines(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    with started_in_fp8(models, ENGINES) as engines:
        yield engines


@pytest.fixture(scope="module")
def more_engines(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    with started_in_fp8(models, MORE_ENGINES) as engines:
        yield engines


@pytest.fixture(scope="module")
def engines_that_leave_out(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    with started_in_fp8(models, {name: ENGINES[name] for name in LEFT_OUT}, LEFT_OUT) as engines:
        yield engines


@pytest.fixture
def engine(name: str, request: pytest.FixtureRequest) -> RolloutEngine:
    engines: dict[str, RolloutEngine] = request.getfixturevalue("some_engines" if name in ENGINES else "more_engines")
    return engines[name]


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerRanks]:
    with trainer_ranks(models["qwen3"], 2, tmp_path_factory.mktemp("trainer")) as trainer:
        yield trainer


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        pytest.param(*case, marks=[proves(case[0], *runs_of({2: [case[2]]}, "resharding fp8")), *marks])
        for cases, marks in (
            (LAYOUTS[:1], []),
            (LAYOUTS[1:], [pytest.mark.long]),
            (MORE_LAYOUTS, [pytest.mark.release]),
        )
        for case in cases
    ],
)
def test_an_engine_in_fp8_holds_what_sglang_loads_of_an_export(
    name: str,
    dtype: str,
    sizes: dict[str, Any],
    engine: RolloutEngine,
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    sources = trainer.call(
        "build", locations("here", 0, 1), sizes=sizes, dtype=dtype, model=models[name], precision="fp8"
    )
    # One rank on a device of the trainer's, one on another node.
    engine_places = [*locations("here", 0), *locations("there", 0)][: engine.config.tp]
    connected = connect(trainer, [engine], sources, [engine_places], models[name], precision="fp8")
    version = 1 + [*LAYOUTS, *MORE_LAYOUTS].index((name, dtype, sizes))
    trainer.call("change", seed=version)
    trainer.call("export", directory=tmp_path / "export", precision="fp8")
    assert differences([engine], tmp_path / "export")
    connected.transfer(version)
    assert differences([engine], tmp_path / "export") == []
    assert versions_of(responses_of(engine, PROMPTS, GREEDY)) == {version}
    assert connected.orders.plan.bytes_aliased == 0
    if engine.config.tp == 1:
        served = served_tensors(load_model_spec(models[name]), torch.bfloat16, "fp8").values()
        assert connected.orders.plan.bytes_moved == sum(prod(shape) * stored.itemsize for shape, stored in served)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(*case, marks=[proves(case[0], *runs_of({2: [case[1]]}, "resharding fp8 fp8_exceptions")), *marks])
        for cases, marks in (
            (LEFT_OUT_LAYOUTS[:1], []),
            (LEFT_OUT_LAYOUTS[1:], [pytest.mark.long]),
            (MORE_LEFT_OUT_LAYOUTS, [pytest.mark.release]),
        )
        for case in cases
    ],
)
def test_matrices_that_are_left_out_are_in_bfloat16_on_both_sides(
    name: str,
    sizes: dict[str, Any],
    engines_that_leave_out: dict[str, RolloutEngine],
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    engine, fp8 = engines_that_leave_out[name], LEFT_OUT[name]
    dtypes = {
        holding.tensor: shared.shards.buffers[holding.buffer].dtype
        for shared in engine.share_weights()
        for holding in shared.shards.holdings
    }
    arguments = {"sizes": sizes, "dtype": "bfloat16", "model": models[name], "precision": "fp8", "fp8": fp8}
    sources = trainer.call("build", locations("here", 0, 1), **arguments)
    engine_places = locations("here", 0, 1)[: engine.config.tp]
    connected = connect(trainer, [engine], sources, [engine_places], models[name], precision="fp8", fp8=fp8)
    version = 1 + [*LEFT_OUT_LAYOUTS, *MORE_LEFT_OUT_LAYOUTS].index((name, sizes))
    trainer.call("change", seed=version)
    trainer.call("export", directory=tmp_path / "export", precision="fp8")
    assert differences([engine], tmp_path / "export")
    connected.transfer(version)
    assert differences([engine], tmp_path / "export") == []
    assert versions_of(responses_of(engine, PROMPTS, GREEDY)) == {version}

    spec = fp8.applied(load_model_spec(models[name]))
    served = served_tensors(spec, torch.bfloat16, "fp8")
    in_fp8 = {tensor for tensor, (_, dtype) in served.items() if dtype == torch.float8_e4m3fn}
    everything = served_tensors(load_model_spec(models[name]), torch.bfloat16, "fp8")
    assert in_fp8 and len(served) < len(everything)
    with TensorFiles(tmp_path / "export") as files:
        assert {tensor for tensor, stored in files.tensors.items() if stored.dtype == "F8_E4M3"} == in_fp8
    # SGLang has chosen these dtypes, before any transfer.
    assert {tensor for tensor, dtype in dtypes.items() if dtype == "float8_e4m3fn"} == in_fp8
    if engine.config.tp == 1:
        moved = sum(prod(shape) * stored.itemsize for shape, stored in served.values())
        assert connected.orders.plan.bytes_moved == moved


TOKENS = [[5, 90, 17, 33, 2, 64, 8, 71, 40, 12, 3, 55]]


def logprobs_of(directory: Path) -> torch.Tensor:
    """Log-probs of the tokens after the first, by transformers with the dequantised weights of a directory."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(dequantised(directory), dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits[0, :-1].log_softmax(-1)
    return expected.gather(1, torch.tensor(TOKENS[0][1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        pytest.param("deepseek_v3", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.release) for name in ("qwen3_moe", *MORE_ENGINES)),
    ],
)
def test_log_probs_are_those_of_the_dequantised_weights(
    name: str, engine: RolloutEngine, models: dict[str, Path], trainer: TrainerRanks, tmp_path: Path
) -> None:
    sources = trainer.call(
        "build", locations("here", 0, 1), sizes={"pp": 2}, dtype="bfloat16", model=models[name], precision="fp8"
    )
    connected = connect(trainer, [engine], sources, [locations("here", 0, 1)[: engine.config.tp]], models[name], "fp8")
    trainer.call("export", directory=tmp_path / "fp8", precision="fp8")
    connected.transfer(100)
    assert differences([engine], tmp_path / "fp8") == []
    (given,) = engine.logprobs(TOKENS, [1])
    assert (torch.tensor(given.logprobs) - logprobs_of(tmp_path / "fp8")).abs().max() < 0.05  # of bfloat16
    if name in ALONE:
        with started([RolloutEngine(tmp_path / "fp8", alone_in_fp8(name))]) as (alone,):
            assert alone.logprobs(TOKENS, [1]) == [given]


ALONE = ("qwen3_moe",)
"""Models that engines without a trainer load, and give the log-probs of those that a trainer sent the weights to."""


def alone_in_fp8(name: str) -> RolloutConfig:
    return IN_FP8.model_copy(update=(ENGINES | MORE_ENGINES)[name] | {"server_args": {}})


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.release)])
def test_an_engine_without_a_trainer_loads_what_others_publish(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    publish(models[name], tmp_path / "published")
    with started([RolloutEngine(tmp_path / "published", alone_in_fp8(name))]) as (engine,):
        (given,) = engine.logprobs(TOKENS, [1])
    assert (torch.tensor(given.logprobs) - logprobs_of(tmp_path / "published")).abs().max() < 0.05  # of bfloat16
