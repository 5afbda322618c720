"""Transfers of adapters that SGLang adds to the weights: log-probs of merged weights, and bytes of adapters alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine3d.errors import EngineError
from engine3d.models import load_model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec, target_names
from engine3d.reshard.describe.adapter import pooled_elements
from engine3d.reshard.describe.trace import LoadTrace
from engine3d.rollout import RolloutEngine, SamplingConfig
from engine3d.rollout.config import ADAPTER_SLOTS
from engine3d.rollout.scheduler.rank import AdapterBase
from tests.support import tiny_families
from tests.support.engine_responses import responses_of, versions_of
from tests.support.proves import proves, runs_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import TrainerRanks, trainer_ranks
from tests.support.transfers import connect, differences, locations, started

pytestmark = pytest.mark.processes

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ENGINES: dict[str, tuple[int, LoraConfig]] = {
    "llama": (2, LoraConfig(rank=4, alpha=6.0, engine="adapter")),
    "qwen3-tied": (2, LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj", "up_proj"), engine="adapter")),
    "qwen2-tied": (1, LoraConfig(rank=4, alpha=8.0, targets=("v_proj", "gate_proj"), engine="adapter")),
    "mistral": (1, LoraConfig(rank=4, alpha=4.0, targets=("k_proj", "o_proj"), engine="adapter")),
    "glm4_moe": (2, LoraConfig(rank=4, alpha=6.0, engine="adapter")),
    "mixtral": (1, LoraConfig(rank=4, alpha=8.0, targets=ATTENTION, engine="adapter")),
    "qwen2_moe": (1, LoraConfig(rank=4, alpha=8.0, targets=("down_proj", "up_proj"), engine="adapter")),
    "minimax_m2": (1, LoraConfig(rank=4, alpha=8.0, targets=ATTENTION, engine="adapter")),
    "gpt_oss": (1, LoraConfig(rank=4, alpha=8.0, targets=ATTENTION, engine="adapter")),
    "deepseek_v3": (2, LoraConfig(rank=4, alpha=6.0, engine="adapter")),
}
"""Tensor parallel size of the engine of each model, and the adapters."""
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tp": 2}),
    ("llama", {"pp": 2, "vpp": 2}),
    ("qwen3-tied", {"tp": 2}),
    ("qwen2-tied", {"pp": 2}),
    ("mistral", {"tp": 2}),
    ("deepseek_v3", {"tp": 2}),
    ("glm4_moe", {"ep": 2}),
    ("qwen2_moe", {"tp": 2}),
    ("mixtral", {"ep": 2}),
    ("gpt_oss", {"tp": 2}),
    ("minimax_m2", {"pp": 2}),
]
CHANGES = {"qwen2_moe": {"shared_expert_intermediate_size": 48}}  # SGLang's pool has the size of dense MLPs
TOLERANCES = {"gpt_oss": 1e-4}
"""Largest differences of log-probs, where they are not 2e-5."""
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    for name in ENGINES:
        tiny_families.make(name, directory / name, changes=CHANGES.get(name))
    return {name: directory / name for name in ENGINES}


@pytest.fixture(scope="module")
def engine_of(models: dict[str, Path]) -> Iterator[Callable[[str], RolloutEngine]]:
    """The engine of a model, started the first time that it is asked for."""
    with ExitStack() as stack:

        @cache
        def start(name: str) -> RolloutEngine:
            tp, lora = ENGINES[name]
            engine = RolloutEngine(models[name], TINY_ROLLOUT.model_copy(update={"tp": tp}), adapters=lora)
            return stack.enter_context(started([engine]))[0]

        yield start


@pytest.fixture(scope="module")
def trainer(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerRanks]:
    with trainer_ranks(models["llama"], 2, tmp_path_factory.mktemp("trainer")) as trainer:
        yield trainer


def test_an_engine_serves_no_adapter_of_another_model(
    engine_of: Callable[[str], RolloutEngine], models: dict[str, Path], trainer: TrainerRanks
) -> None:
    (tp, lora), engine = ENGINES["llama"], engine_of("llama")
    engine_places = [locations("here", *range(tp))]
    sources = trainer.call(
        "build", [*locations("here", 0), *locations("there", 0)], sizes={"tp": 2}, model=models["llama"], lora=lora
    )
    base = sources[0].base
    assert base is not None
    alone = connect(trainer, [engine], sources, engine_places, models["llama"], adapters=lora, alone=True)
    with pytest.raises(EngineError, match="came to an engine with none"):
        alone.transfer(1, base=AdapterBase(base, sent=False))
    with pytest.raises(EngineError, match="version 1 was not committed"):
        responses_of(engine, PROMPTS, GREEDY)
    complete = connect(trainer, [engine], sources, engine_places, models["llama"], adapters=lora)
    complete.transfer(2, base=AdapterBase(base, sent=True))
    alone = connect(trainer, [engine], sources, engine_places, models["llama"], adapters=lora, alone=True)
    with pytest.raises(EngineError, match=f"of the model other came to an engine with {base}"):
        alone.transfer(3, base=AdapterBase("other", sent=False))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name,
            sizes,
            marks=[
                proves(tiny_families.family_of(name), *runs_of({2: [sizes]}, "resharding lora")),
                *([] if name == "llama" else [pytest.mark.long]),
            ],
        )
        for name, sizes in LAYOUTS
    ],
)
def test_engines_add_adapters_as_if_they_were_merged(
    name: str,
    sizes: dict[str, Any],
    engine_of: Callable[[str], RolloutEngine],
    models: dict[str, Path],
    trainer: TrainerRanks,
    tmp_path: Path,
) -> None:
    """The model comes once, then the bytes of adapters alone. Of each version nothing is left with the next."""
    (tp, lora), engine = ENGINES[name], engine_of(name)
    engine_places = [locations("here", *range(tp))]
    sources = trainer.call(
        "build", [*locations("here", 0), *locations("there", 0)], sizes=sizes, model=models[name], lora=lora
    )
    base = sources[0].base
    assert base is not None and base.startswith("sampled-sha256:")
    complete = connect(trainer, [engine], sources, engine_places, models[name], adapters=lora)
    _has_the_planned_memory(engine, models[name], lora)
    for version in (1, 2, 3):
        alone = version > 1
        connected = complete
        if alone:
            connected = connect(trainer, [engine], sources, engine_places, models[name], adapters=lora, alone=True)
        trainer.call("change", seed=version)
        connected.transfer(version, base=AdapterBase(base, sent=not alone))
        trainer.call("export", directory=tmp_path / f"{version}", served=True)
        trainer.call("export", directory=tmp_path / f"merged-{version}")
        assert differences([engine], tmp_path / f"{version}") == []
        if alone:
            assert connected.orders.plan.bytes_moved == _bytes(models[name], lora, tp)
        _has_logprobs_of(engine, tmp_path / f"merged-{version}", version, TOLERANCES.get(name, 2e-5))
    trainer.call("change", seed=4)
    trainer.call("export", directory=tmp_path / "4", served=True)
    assert all("lora" in difference for difference in differences([engine], tmp_path / "4"))


def _has_the_planned_memory(engine: RolloutEngine, model: Path, lora: LoraConfig) -> None:
    """Slots of adapters take what is planned for them from the trace of the weights."""
    shards = engine.share_weights()[0].shards
    of_adapters = [buffer for buffer in shards.buffers if buffer.name.endswith((".lora_A", ".lora_B"))]
    weights, spec = LoadTrace(shards.buffers[: -len(of_adapters)], shards.holdings), load_model_spec(model)
    planned = ADAPTER_SLOTS * pooled_elements(weights, lora, target_names(spec), spec.sizes.layers)
    pooled = sum(buffer.elements for buffer in of_adapters)
    if spec.sizes.sparse:  # SGLang's pool has those of experts in every layer
        of_experts = sum(buffer.elements for buffer in of_adapters if ".experts." in buffer.name)
        pooled += of_experts * spec.sizes.sparse.count(False) // spec.sizes.sparse.count(True)
    assert pooled == planned


def _has_logprobs_of(engine: RolloutEngine, merged: Path, version: int, tolerance: float) -> None:
    """The engine's tokens and log-probs are those of transformers' model with the merged weights."""
    groups = responses_of(engine, PROMPTS, GREEDY)
    assert versions_of(groups) == {version}
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    for prompt, [response] in zip(PROMPTS, groups, strict=True):
        tokens = torch.tensor([[*prompt, *response.token_ids]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert response.token_ids == logprobs.argmax(-1).tolist()
        expected = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        assert response.logprobs == pytest.approx(expected.tolist(), abs=tolerance)


def _bytes(model: Path, lora: LoraConfig, tp: int) -> int:
    """Bytes of the adapters in float32 on all ranks of an engine: each has what its layers' ranks have not cut."""
    total, spec = 0, load_model_spec(model)
    for name, tensor in AdapterSpec.of(spec, lora).hf_tensors.items():
        by_columns = ".o_proj." in name or ".down_proj." in name
        copies = tp if (".lora_B." in name) == by_columns else 1
        if ".q_a_proj." in name or ".kv_a_proj_with_mqa." in name:  # which are cut on no rank
            copies = tp
        if ".k_proj.lora_B" in name or ".v_proj.lora_B" in name:
            copies = max(1, tp // spec.sizes.groups)
        total += 4 * copies * prod(tensor.shape)
    return total
