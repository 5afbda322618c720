"""Interleaved and uneven pipeline stages against one rank: outputs, updates, exported weights and checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, model_spec
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from tests.engine3d.training.test_engine import _local_samples, _loss, _samples
from tests.support.distributed import run_distributed
from tests.support.proves import proves, run_of
from tests.support.tiny_families import CONFIGS

# With so large an epsilon an element's step is in proportion to its gradient, whose rounding errors Adam's sign of a
# gradient of almost 0 would turn into a step of the full length.
SETTINGS = OptimizerConfig(lr=1e-2, clip_grad=0.5, eps=1e-2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**CONFIGS["llama"], "num_hidden_layers": 5},
    "tied": CONFIGS["qwen3-tied"],
    "experts": CONFIGS["qwen3_moe"],
    "latent": {**CONFIGS["deepseek_v3"], "num_hidden_layers": 5},
}
BALANCED = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.02}


@dataclass(frozen=True)
class _Case:
    """A model on a layout, with settings that differ from those of one rank."""

    model: str
    sizes: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model} {self.sizes} {self.settings}"


INTERLEAVED = {"pp": 2, "vpp": 2}
CASES: dict[int, list[_Case]] = {
    2: [
        _Case("llama", {**INTERLEAVED, "stages": (1, 2, 1, 1)}, {"recompute": "full", "recompute_layers": 1}),
        _Case("tied", INTERLEAVED, {"micro_batch_tokens": 1000, "logits_tokens": 5}),
        _Case("experts", INTERLEAVED, {"micro_batch_tokens": 20}),
    ],
    4: [
        _Case("llama", {"tp": 2, **INTERLEAVED}, {"recompute": "full"}),
        _Case("llama", {"pp": 4, "stages": (1, 2, 1, 1)}),
        _Case("tied", INTERLEAVED, {"packing": False}),
        _Case("experts", {"ep": 2, **INTERLEAVED}, {"recompute": "full"}),
        _Case("experts", {"tp": 2, **INTERLEAVED}),
        _Case("latent", {"ep": 2, **INTERLEAVED, "stages": (1, 1, 2, 1)}),
        _Case("latent", {"tp": 2, "pp": 2, "stages": (2, 3)}),
    ],
}
FURTHER_CASES = [_Case("llama", {"pp": 2, "stages": (4, 1)}, {"packing": False}), _Case("latent", INTERLEAVED)]
"""Cases of two ranks in the tests of a release."""


@dataclass(frozen=True)
class _Result:
    """Results of a rank: its samples with their outputs, and of each update the loss, gradient norm and bubble."""

    mine: list[int]
    before: dict[str, torch.Tensor] | None
    after: dict[str, torch.Tensor] | None
    updates: list[tuple[float, float, float | None]]
    routing: list[Any]


def _outputs(engine: Any, sequences: Any) -> dict[str, torch.Tensor] | None:
    outputs = engine.logprobs(sequences, with_entropy=True)
    return None if outputs is None else {"logprobs": outputs.logprobs, "entropy": outputs.entropy}


def _trained(root: Path, case: _Case, export: Path) -> _Result:
    """Two updates, and the weights after them."""
    from engine3d.training.engine import TrainEngine

    experts = {"megatron": BALANCED} if case.model in ("experts", "latent") else {}
    arguments = {"dtype": "float32", "micro_batch_tokens": 40, "optimizer": SETTINGS} | experts | case.settings
    layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **case.sizes)
    engine = TrainEngine(root / case.model, TrainConfig(**arguments), layout, seed=1)
    sequences, mine = _local_samples(_samples(), engine)
    before, updates, routing = _outputs(engine, sequences), [], []
    for _ in range(2):
        result = engine.update(sequences, _loss, with_entropy=True)
        loss = torch.stack([torch.zeros(()), *result.loss_outputs]).sum()
        dist.all_reduce(loss)
        updates.append((float(loss) / layout.tp, result.grad_norm, result.bubble))
        routing.append(result.routing)
    after = _outputs(engine, sequences)
    engine.export(export)
    engine.close()
    return _Result(mine, before, after, updates, routing)


def _trained_all(root: Path, cases: list[_Case], exports: Path) -> list[_Result]:
    return [
        _trained(root, case, exports / f"{int(os.environ['WORLD_SIZE'])}-{number}") for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    for name, config in MODELS.items():
        initialise_random(model_spec({**config, "initializer_range": 0.1}), root / name, seed=1, dtype=torch.float32)
    return root


@cache
def alone(root: Path, models: tuple[str, ...]) -> dict[str, tuple[_Result, dict[str, torch.Tensor]]]:
    """Results of models on one rank, and their weights after the updates."""
    cases, exports = [_Case(name, {}) for name in models], root / "-".join(models)
    [results] = run_distributed(_trained_all, 1, root, cases, exports, timeout_s=300)
    return {
        case.model: (result, _tensors(exports / f"1-{number}"))
        for number, (case, result) in enumerate(zip(cases, results, strict=True))
    }


def _proves(test: Any) -> Any:
    """Mark a test with the runs of the cases."""
    for world_size, cases in (*CASES.items(), (2, FURTHER_CASES)):
        for case in cases:
            features = ["packing" if case.settings.get("packing", True) else "padding"]
            features += ["recomputation"] * ("recompute" in case.settings)
            run = run_of(Layout.of_world(world_size, **case.sizes), " ".join(features))
            test = proves(MODELS[case.model]["model_type"], run)(test)
    return test


@_proves
@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, CASES[2]),
        pytest.param(4, CASES[4], marks=pytest.mark.long),
        pytest.param(2, FURTHER_CASES, marks=pytest.mark.release),
    ],
)
def test_stages_compute_what_one_rank_does(root: Path, tmp_path: Path, world_size: int, cases: list[_Case]) -> None:
    one_rank = alone(root, tuple(dict.fromkeys(case.model for case in cases)))
    ranks = run_distributed(_trained_all, world_size, root, cases, tmp_path, timeout_s=300)
    for number, case in enumerate(cases):
        expected, weights = one_rank[case.model]
        results = [rank[number] for rank in ranks]
        for result in results:
            for (loss, norm, bubble), (one_loss, one_norm, _) in zip(result.updates, expected.updates, strict=True):
                assert loss == pytest.approx(one_loss, rel=1e-5), case.name
                assert norm == pytest.approx(one_norm, rel=1e-5), case.name
                assert bubble is not None and bubble <= 1 / case.sizes.get("vpp", 1) * (case.sizes["pp"] - 1)
            for routing, one_routing in zip(result.routing, expected.routing, strict=True):
                if routing is not None:
                    assert routing.layers == one_routing.layers
                    assert routing.loads == one_routing.loads, case.name
                    assert routing.z == pytest.approx(one_routing.z, rel=1e-5), case.name
        for moment in ("before", "after"):
            for output in ("logprobs", "entropy"):
                actual, expected_output = (_by_sample(of, moment, output) for of in (results, [expected]))
                assert actual.keys() == expected_output.keys() == set(range(len(_samples())))
                for index in expected_output:
                    torch.testing.assert_close(actual[index], expected_output[index], atol=1e-5, rtol=1e-5)
        exported = _tensors(tmp_path / f"{world_size}-{number}")
        assert exported.keys() == weights.keys(), case.name
        for name, tensor in weights.items():
            torch.testing.assert_close(exported[name], tensor, atol=1e-5, rtol=1e-5, msg=f"{case.name} {name}")


def _by_sample(results: list[_Result], moment: str, output: str) -> dict[int, torch.Tensor]:
    samples, by_index = _samples(), dict[int, torch.Tensor]()
    for result in results:
        if (outputs := getattr(result, moment)) is not None:
            split = outputs[output].split([len(samples[index]) for index in result.mine])
            by_index |= dict(zip(result.mine, split, strict=True))
    return by_index


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vpp": 2}, "vpp=2 with pp=1: expected vpp=1, or pp of at least 2"),
        ({"pp": 2, "stages": [1, 2, 1]}, "stages=1,2,1 has 3 stages, expected pp*vpp = 2*1 = 2"),
        ({"pp": 2, "stages": [4, 0]}, "stages=4,0: stage 1 has no layers, expected at least 1 in each"),
        ({"pp": 2, "stages": [4, 1]}, "stages=4,1 add up to 5 layers, expected num_hidden_layers=4"),
        ({"pp": 2, "vpp": 3}, "pp*vpp = 2*3 = 6 stages: expected at most num_hidden_layers=4"),
    ],
)
def test_stages_that_cannot_be_are_one_clear_line(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        model_spec(MODELS["tied"]).check_layout(LayoutConfig(**sizes).layout(2))
    assert str(error.value) == f"layout: {message}"
