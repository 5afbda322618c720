"""Transfers of every family: tied embeddings, latent attention, what is computed after loading, casts; other models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.reshard.plan.coordinate import coordinate
from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.support import tiny_families
from tests.support.engine_responses import responses_of, versions_of
from tests.support.proves import proves, runs_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import TrainerRanks, trainer_ranks
from tests.support.transfers import connect, differences, locations, started

pytestmark = pytest.mark.processes

ENGINES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"tp": 2},
    "llama": {"tp": 2, "dtype": "bfloat16"},
    "deepseek_v3": {"tp": 2, "ep": 2},
    "qwen2-tied": {"tp": 2},
    "mistral": {"tp": 1},
    "qwen2_moe": {"tp": 2, "ep": 2},
    "mixtral": {"tp": 2, "ep": 2},
    "glm4_moe": {"tp": 2},
    "minimax_m2": {"tp": 2},
    "gpt_oss": {"tp": 2},
    "qwen3_next": {"tp": 2, "ep": 2},
    "qwen3_5_moe": {"tp": 2, "ep": 2},
    "qwen3_5-tied": {"tp": 2},
}
GROUPS = (
    ("qwen3-tied", "llama", "deepseek_v3"),
    ("qwen2-tied", "mistral", "qwen2_moe", "mixtral", "glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next"),
    ("qwen3_5_moe", "qwen3_5-tied"),
)
"""Engines that run at the same time. Those of later groups are traced without processes too (`test_simulate`)."""
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3-tied", "float32", {"pp": 2, "vpp": 2}),
    ("llama", "float32", {"tp": 2}),
    ("deepseek_v3", "float32", {"pp": 2, "stages": (3, 1)}),
    ("deepseek_v3", "float32", {"ep": 2}),
    ("qwen2-tied", "float32", {"pp": 2, "vpp": 2}),
    ("mistral", "float32", {"tp": 2}),
    ("qwen2_moe", "float32", {"tp": 2, "etp": 2}),
    ("mixtral", "float32", {"tp": 2, "ep": 2}),
    ("glm4_moe", "float32", {"tp": 2, "ep": 2}),
    ("minimax_m2", "float32", {"pp": 2, "vpp": 2}),
    ("gpt_oss", "float32", {"tp": 2, "ep": 2}),
    ("qwen3_next", "float32", {"pp": 2, "stages": (1, 3)}),
    ("qwen3_5_moe", "float32", {"tp": 2, "ep": 2}),
    ("qwen3_5-tied", "float32", {"pp": 2, "stages": (1, 3)}),
]
MORE_LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3-tied", "float32", {"tp": 2}),
    ("llama", "bfloat16", {"pp": 2}),
    ("deepseek_v3", "float32", {"tp": 2}),
    ("qwen2-tied", "float32", {"tp": 2}),
    ("qwen2-tied", "float32", {"cp": 2}),
    ("mistral", "float32", {"pp": 2, "stages": (3, 1)}),
    ("qwen2_moe", "float32", {"tp": 2, "ep": 2}),
    ("qwen2_moe", "float32", {"pp": 2}),
    ("mixtral", "float32", {"ep": 2}),
    ("mixtral", "float32", {"pp": 2}),
    ("glm4_moe", "float32", {"pp": 2, "vpp": 2}),
    ("glm4_moe", "float32", {"ep": 2}),
    ("minimax_m2", "float32", {"tp": 2, "ep": 2}),
    ("minimax_m2", "float32", {"ep": 2}),
    ("gpt_oss", "float32", {"pp": 2, "vpp": 2}),
    ("gpt_oss", "float32", {"ep": 2}),
    ("qwen3_next", "float32", {"tp": 2, "ep": 2}),
    ("qwen3_next", "float32", {"ep": 2}),
    ("qwen3_5_moe", "float32", {"pp": 2, "stages": (1, 3)}),
    ("qwen3_5_moe", "float32", {"ep": 2}),
    ("qwen3_5-tied", "float32", {"tp": 2}),
]
"""Layouts that are checked before a release."""
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("families")
    for name in ENGINES:
        tiny_families.make(name, directory / name)
    return {name: directory / name for name in ENGINES}


def running(names: tuple[str, ...], models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    engines = [RolloutEngine(models[name], TINY_ROLLOUT.model_copy(update=ENGINES[name])) for name in names]
    with started(engines):
        yield dict(zip(names, engines, strict=True))


@pytest.fixture(scope="module")
def engines(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    yield from running(GROUPS[0], models)


@pytest.fixture(scope="module")
def other_engines(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    yield from running(GROUPS[1], models)


@pytest.fixture(scope="module")
def engines_with_tower(models: dict[str, Path]) -> Iterator[dict[str, RolloutEngine]]:
    yield from running(GROUPS[2], models)


def cases_of(group: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(
            *case, marks=[proves(tiny_families.family_of(case[0]), *runs_of({2: [case[2]]}, "resharding")), *marks]
        )
        for cases, marks in ((LAYOUTS, []), (MORE_LAYOUTS, [pytest.mark.release]))
        for case in cases
        if case[0] in group
    ]


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerRanks]:
    with trainer_ranks(models["llama"], 2, tmp_path_factory.mktemp("trainer")) as trainer:
        yield trainer


@pytest.mark.parametrize(("name", "dtype", "sizes"), cases_of(GROUPS[0]))
def test_every_family_holds_what_sglang_loads_of_an_export(
    name: str,
    dtype: str,
    sizes: dict[str, Any],
    engines: dict[str, RolloutEngine],
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    check_transfer(name, dtype, sizes, engines[name], models, trainer, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "sizes"), cases_of(GROUPS[1]))
def test_other_families_hold_what_sglang_loads_of_an_export(
    name: str,
    dtype: str,
    sizes: dict[str, Any],
    other_engines: dict[str, RolloutEngine],
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    check_transfer(name, dtype, sizes, other_engines[name], models, trainer, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "sizes"), cases_of(GROUPS[2]))
def test_language_models_next_to_a_vision_tower_hold_what_sglang_loads_of_an_export(
    name: str,
    dtype: str,
    sizes: dict[str, Any],
    engines_with_tower: dict[str, RolloutEngine],
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    check_transfer(name, dtype, sizes, engines_with_tower[name], models, trainer, tmp_path)


def check_transfer(
    name: str,
    dtype: str,
    sizes: dict[str, Any],
    engine: RolloutEngine,
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    sources = trainer.call("build", locations("here", 0, 1), sizes=sizes, dtype=dtype, model=models[name])
    # One rank on a device of the trainer's, one on another node.
    engine_places = [[*locations("here", 0), *locations("there", 0)][: engine.config.tp]]
    connected = connect(trainer, [engine], sources, engine_places, models[name])
    version = 1 + [*LAYOUTS, *MORE_LAYOUTS].index((name, dtype, sizes))
    trainer.call("change", seed=version)
    trainer.call("export", directory=tmp_path / "export", dtype=getattr(torch, engine.config.dtype))
    assert differences([engine], tmp_path / "export")
    connected.transfer(version)
    assert differences([engine], tmp_path / "export") == []
    assert versions_of(responses_of(engine, PROMPTS, GREEDY)) == {version}
    if engine.config.dtype == "float32":
        check_log_probs(engine, tmp_path / "export")


def check_log_probs(engine: RolloutEngine, export: Path) -> None:
    """The engine's log-probs of an export are those of transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tokens = [[5, 90, 17, 33, 2, 64, 8, 71, 40, 12, 3, 55] * 4]
    tower = "text_config" in json.loads((export / "config.json").read_text())
    classes = AutoModelForImageTextToText if tower else AutoModelForCausalLM
    reference = classes.from_pretrained(export, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits[0, :-1].log_softmax(-1)
    (given,) = engine.logprobs(tokens, [1])
    chosen = expected.gather(1, torch.tensor(tokens[0][1:])[:, None])[:, 0]
    assert (torch.tensor(given.logprobs) - chosen).abs().max() < 1e-4


def test_what_is_computed_after_loading_is_missed_when_it_is_not(
    engines: dict[str, RolloutEngine], models: dict[str, Path], trainer: TrainerRanks, tmp_path: Path
) -> None:
    engine, model = engines["deepseek_v3"], models["deepseek_v3"]
    sources = trainer.call("build", locations("here", 0, 1), sizes={"ep": 2}, model=model)
    connected = connect(trainer, [engine], sources, [locations("here", 0, 1)], model)
    trainer.call("change", seed=100)
    trainer.call("export", directory=tmp_path / "export")
    connected.write(100)
    layers = tiny_families.DEEPSEEK["num_hidden_layers"]
    stale = {f"model.layers.{layer}.self_attn.{kind}" for layer in range(layers) for kind in ("w_kc", "w_vc")}
    for _ in range(2):
        differing = [difference for rank in engine.verify_weights(tmp_path / "export") for difference in rank]
        assert {difference.buffer for difference in differing} == stale and len(differing) == 2 * len(stale)
        assert all(difference.elements == difference.of for difference in differing)
    engine.seal_weights(100)
    engine.commit_weights(100)
    assert differences([engine], tmp_path / "export") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vocab_size": 98},
            "tensor model.embed_tokens.weight: the trainer has it in shape [98, 32], engine 5 in [97, 32]",
        ),
        (
            {"vocab_size": 96},
            "tensor model.embed_tokens.weight: the trainer has it in shape [96, 32], engine 5 in [97, 32]",
        ),
        (
            {"hidden_size": 48},
            "tensor model.embed_tokens.weight: the trainer has it in shape [97, 48], engine 5 in [97, 32]",
        ),
        (
            {"num_hidden_layers": 5},
            "tensor model.layers.4.input_layernorm.weight: the trainer has it in shape [32], engine 5 has not",
        ),
        (
            {"num_hidden_layers": 3},
            "tensor model.layers.3.self_attn.q_a_proj.weight: engine 5 has it in shape [32, 32], the trainer has not",
        ),
        (
            {"n_routed_experts": 16},
            "tensor model.layers.1.mlp.gate.weight: the trainer has it in shape [16, 32], engine 5 in [8, 32]",
        ),
    ],
    ids=["more tokens", "fewer tokens", "wider", "more layers", "fewer layers", "more experts"],
)
def test_another_model_is_refused_before_anything_is_written(
    options: dict[str, int], message: str, engines: dict[str, RolloutEngine], models: dict[str, Path]
) -> None:
    engine = engines["deepseek_v3"]
    before = differences([engine], models["deepseek_v3"])
    spec = model_spec(tiny_families.DEEPSEEK | options)
    planned = PlannedTrainer(spec, Layout.of_world(2, tp=2), torch.float32, transformer_engine=False)
    sources = [
        SharedShards(planned.shards(rank, location), ()) for rank, location in enumerate(locations("here", 0, 1))
    ]
    targets = engine.share_weights("engine 5", 0, locations("here", 0, 1))
    with pytest.raises(UserError) as refused:
        coordinate(sources, targets, {name: tensor.shape for name, tensor in spec.hf_tensors.items()})
    assert str(refused.value) == message
    assert differences([engine], models["deepseek_v3"]) == before
    assert responses_of(engine, PROMPTS, GREEDY)


def test_another_family_is_refused(engines: dict[str, RolloutEngine]) -> None:
    spec = model_spec(tiny_families.CONFIGS["llama"] | {"head_dim": 16, "num_key_value_heads": 2})
    planned = PlannedTrainer(spec, Layout.of_world(1), torch.float32, transformer_engine=False)
    sources = [SharedShards(planned.shards(0, locations("here", 0)[0]), ())]
    targets = engines["qwen3-tied"].share_weights("engine 0", 0, locations("here", 0, 1))
    with pytest.raises(UserError, match=r"tensor lm_head.weight: the trainer has it in .*, engine 0 has not"):
        coordinate(sources, targets, {name: tensor.shape for name, tensor in spec.hf_tensors.items()})
