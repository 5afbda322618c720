"""Adapters on all layouts against the peft library: losses, gradients and updated adapters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from engine3d.layout import Layout
from engine3d.models.files.weights import rank_parameters
from engine3d.models.lora.config import LoraConfig
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.megatron import settings as megatron_settings
from engine3d.training.passes.sequences import Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.gradients import gradients, slices
from tests.support.peft_models import adapter_tensors, fill, filled, with_adapters
from tests.support.proves import proves, runs_of

pytestmark = pytest.mark.processes

MODELS = {
    "qwen3_moe": LoraConfig(rank=4, alpha=6),
    "llama": LoraConfig(rank=3, alpha=6, targets=("q_proj", "v_proj", "up_proj", "down_proj")),
    "deepseek_v3": LoraConfig(rank=4, alpha=4),
    "glm4_moe": LoraConfig(rank=4, alpha=6),
    "qwen2_moe": LoraConfig(rank=4, alpha=6),
    "mixtral": LoraConfig(rank=4, alpha=6, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    "minimax_m2": LoraConfig(rank=4, alpha=6, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    "gpt_oss": LoraConfig(rank=4, alpha=6, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
}
ON_TWO_RANKS: dict[str, list[dict[str, Any]]] = {
    "glm4_moe": [{"tp": 2, "ep": 2}, {"ep": 2}],
    "qwen2_moe": [{"tp": 2, "etp": 2}],
    "mixtral": [{"ep": 2}],
    "minimax_m2": [{"tp": 2}, {"pp": 2}],
    "gpt_oss": [{"tp": 2}],
}
"""Layouts of models that are on one and two ranks alone."""
DENSE: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {}, {"cp": 2}],
    4: [{"tp": 4}, {"tp": 2, "pp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}],
}
EXPERTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}, {"cp": 2}],
    4: [
        {"tp": 2, "ep": 2, "etp": 2},
        {"pp": 2, "ep": 2},
        {"tp": 4, "ep": 2, "etp": 2},
        {"cp": 2, "ep": 2},
        {"cp": 2, "tp": 2, "etp": 2},
        {"cp": 2, "pp": 2},
    ],
}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [{"tp": 2, "ep": 2}, {"cp": 2}],
    "llama": [{"tp": 2}, {"pp": 2}],
    "deepseek_v3": [{"tp": 2, "etp": 2}],
}
"""Layouts of two ranks in the shorter test: each dimension with the models that it cuts otherwise."""
UPDATES = 2
SETTINGS = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
TOLERANCE = 1e-5
BF16_LOSS, BF16_ANGLE = 0.05, 0.1
"""Most of what a mean loss in bf16 differs from one in float32, and 1 - cosine of the gradients."""


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (9,), generator=generator).tolist()
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def _weight() -> float:
    return 1 / sum(len(sample) - 1 for sample in _samples())


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every model, and beside each the updates of peft."""
    root = tmp_path_factory.mktemp("models")
    for name, lora in MODELS.items():
        model = with_adapters(tiny_families.make(name, root / name), name, lora)
        if name == "llama":
            model.save_pretrained(root / name / "peft")
        torch.save(_peft_updates(model), root / name / "reference.pt")
    return root


def _peft_updates(model: Any) -> dict[str, Any]:
    tensors = adapter_tensors(model)
    optimizer = torch.optim.AdamW(
        tensors.values(),
        lr=SETTINGS.lr,
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
    )
    result: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for sample in _samples():
            tokens = torch.tensor(sample)
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            loss = loss - _weight() * logprobs.gather(1, tokens[1:, None]).sum()
        loss.backward()
        result["losses"].append(float(loss.detach()))
        result["gradients"].append(
            {
                name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
                for name, tensor in tensors.items()
            }
        )
        result["norms"].append(float(clip_grad_norm_(list(tensors.values()), SETTINGS.clip_grad)))
        optimizer.step()
    return result | {"adapters": {name: tensor.detach() for name, tensor in tensors.items()}}


def _layouts(name: str) -> dict[int, list[dict[str, Any]]]:
    if name in ON_TWO_RANKS:
        return {1: [{}], 2: ON_TWO_RANKS[name], 4: []}
    return EXPERTS if tiny_families.has_experts(name) else DENSE


def on_all_layouts(test: Any) -> Any:
    """Mark a test that runs each model on each of its layouts."""
    for name in MODELS:
        test = proves(tiny_families.family_of(name), *runs_of(_layouts(name), "packing lora"))(test)
    return test


def _runs(world_size: int, *, further: bool) -> dict[str, list[dict[str, Any]]]:
    """Layouts of some ranks by model, in the shorter test or in further ones."""
    layouts = {name: _layouts(name)[world_size] for name in MODELS}
    if world_size != 2:
        return layouts
    return {name: [sizes for sizes in of if (sizes in PAIRS.get(name, ())) != further] for name, of in layouts.items()}


@on_all_layouts
@pytest.mark.parametrize(
    ("world_size", "further"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.release),
        pytest.param(4, True, marks=pytest.mark.long),
    ],
)
def test_updates_equal_those_of_peft(references: Path, world_size: int, further: bool) -> None:
    runs = _runs(world_size, further=further)
    results = run_distributed(compare_all, world_size, references, runs, timeout_s=300)
    for name, layouts in runs.items():
        for sizes in layouts:
            seen: set[str] = set()
            for rank, result in enumerate(results):
                differences, names = result[name, str(sizes)]
                seen |= names
                for kind, difference in differences.items():
                    assert difference < TOLERANCE, f"rank {rank}, {sizes}, {name}: {kind} differ by {difference}"
            assert seen == set(torch.load(references / name / "reference.pt")["adapters"]), (name, sizes)


def compare_all(
    references: Path, runs: dict[str, list[dict[str, Any]]]
) -> dict[tuple[str, str], tuple[dict[str, float], set[str]]]:
    """Compare models on layouts of these ranks. Returns differences and the names of this rank's tensors."""
    world_size = int(os.environ["WORLD_SIZE"])
    results = {}
    for name, layouts in runs.items():
        for sizes in layouts:
            layout = Layout.of_world(world_size, **sizes)
            results[name, str(sizes)] = _compare(references / name, MODELS[name], sizes, layout)
    return results


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = -(outputs.logprobs * columns["weights"]).sum()
    return loss, loss.detach()


def _compare(
    model: Path, lora: LoraConfig, sizes: dict[str, Any], layout: Layout, dtype: str = "float32"
) -> tuple[dict[str, float], set[str]]:
    from engine3d.training.engine import TrainEngine

    given = model / "peft"  # written by peft: training starts from it
    lora = lora.model_copy(update={"path": given if given.exists() else None})
    config = TrainConfig(
        layout=LayoutConfig(**sizes),
        dtype=dtype,
        lora=lora,
        optimizer=SETTINGS,
        micro_batch_tokens=24 if layout.cp == 1 else 6,  # fewer than a sequence has, so that it is split
    )
    engine = TrainEngine(model, config, layout, seed=1)
    differences = dict.fromkeys(("initial", "loss", "gradients", "norm", "adapters", "base"), 0.0)
    adapters = rank_parameters(engine.module, engine.trained, layout, engine.coordinates)
    base = [
        (tensor, tensor.clone())
        for _, tensor in rank_parameters(engine.module, engine.spec, layout, engine.coordinates)
    ]
    samples = _samples()
    mine = list(range(engine.coordinates.dp, len(samples), layout.dp))
    weights = [weight for index in mine for weight in [0.0] + [_weight()] * (len(samples[index]) - 1)]
    sequences = Sequences.of([samples[index] for index in mine], weights=torch.tensor(weights))
    initial = engine.logprobs(sequences)
    earlier = [(tensor, tensor.clone()) for _, tensor in adapters]
    fill(engine)
    assert lora.path is None or all(torch.equal(tensor, read) for tensor, read in earlier)
    assert engine.adapters is not None
    with engine.adapters.disabled():
        disabled = engine.logprobs(sequences)
    if initial is not None and disabled is not None and lora.path is None:  # B is 0 at first
        assert initial.logprobs is not None and disabled.logprobs is not None
        assert torch.equal(initial.logprobs, disabled.logprobs)
    _merged_weights_are_sums(engine, lora)
    expected = torch.load(model / "reference.pt")
    products = torch.zeros(3)
    names: set[str] = set()
    for number in range(UPDATES):
        result = engine.update(sequences, _loss)
        loss = torch.stack([torch.zeros((), device=engine.device), *result.loss_outputs]).sum()
        dist.all_reduce(loss)
        assert layout.cp == 1 or result.split_share
        _widen(differences, "loss", abs(float(loss) / (layout.tp * layout.cp) - expected["losses"][number]))
        _widen(differences, "norm", abs(result.grad_norm - expected["norms"][number]))
        clip = min(1.0, SETTINGS.clip_grad / (expected["norms"][number] + 1e-6))
        for region, gradient in gradients(engine):
            names.add(region.hf_name)
            values = clip * expected["gradients"][number][region.hf_name][slices(region.hf_box)]
            gradient = gradient.float().cpu()
            _widen(differences, "gradients", _most(gradient, values))
            products += torch.stack([(gradient * values).sum(), gradient.square().sum(), values.square().sum()])
    for local, tensor in adapters:
        for region in local.slices:
            values = expected["adapters"][region.hf_name][slices(region.hf_box)]
            _widen(differences, "adapters", _most(tensor[slices(region.local_box)].float().cpu(), values))
    differences["angle"] = float(1 - products[0] / (products[1] * products[2]).sqrt())
    for tensor, before in base:
        assert torch.equal(tensor, before) and not tensor.requires_grad
    trained = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    assert trained == sum(tensor.numel() for _, tensor in adapters)
    engine.close()
    return differences, names


def _merged_weights_are_sums(engine: Any, lora: LoraConfig) -> None:
    """Assert that merged weights are W + alpha / rank * B A of the adapters that the test has filled."""
    adapted = {name.removesuffix(".lora_A.weight") for name in engine.trained.hf_tensors if ".lora_A." in name}
    seen = set()
    for local, weight in rank_parameters(engine.module, engine.spec, engine.layout, engine.coordinates):
        merged = engine.adapters.merged(weight)
        for region in local.slices:
            module, box = region.hf_name.removesuffix(".weight"), slices(region.hf_box)
            values = weight[slices(region.local_box)].detach().float().cpu()
            if module in adapted:
                seen.add(module)
                names = (f"{module}.lora_B.weight", f"{module}.lora_A.weight")
                b, a = (filled(name, engine.trained.hf_shape(name)).to(weight.dtype).float() for name in names)
                values = values + lora.scale * (b @ a)[box]
            actual = merged[slices(region.local_box)]
            torch.testing.assert_close(actual.cpu(), values.to(weight.dtype), atol=1e-6, rtol=1e-2, msg=region.hf_name)
    assert seen


def _most(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


def _widen(differences: dict[str, float], name: str, value: float) -> None:
    differences[name] = max(differences[name], value)


ON_GPUS = {
    # Ranks that grouped GEMMs take, and one that they do not, and experts without adapters, which are fused.
    "experts": ("qwen3_moe", LoraConfig(rank=8, alpha=12)),
    "no kernel": ("qwen3_moe", LoraConfig(rank=4, alpha=6)),
    "up alone": ("qwen3_moe", LoraConfig(rank=8, alpha=12, targets=("up_proj", "q_proj"))),
    "fused experts": ("qwen3_moe", LoraConfig(rank=8, alpha=12, targets=("q_proj", "k_proj", "v_proj", "o_proj"))),
    "dense": ("llama", MODELS["llama"]),
    "latent": ("deepseek_v3", LoraConfig(rank=8, alpha=8)),
}
GPU_LAYOUTS: list[dict[str, Any]] = [
    {},
    *({"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2}, {"ep": 2}, {"pp": 2}, {"cp": 2}),
]


def compare_on_gpus(directory: Path, lora: LoraConfig, sizes: dict[str, Any]) -> dict[str, float]:
    """Compare updates in bf16 with those of peft in float32. Returns the differences."""
    layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **sizes)
    with pytest.MonkeyPatch.context() as patch:  # what `check` refuses until it has been run here
        patch.setattr(megatron_settings, "check_lora_on_gpus", lambda *_: None)
        return _compare(directory, lora, sizes, layout, "bfloat16")[0]


@pytest.mark.gpu
@pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine")
@pytest.mark.parametrize("sizes", GPU_LAYOUTS, ids=str)
@pytest.mark.parametrize("case", ON_GPUS)
def test_layers_of_transformer_engine_have_the_adapters_of_peft(
    case: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    name, lora = ON_GPUS[case]
    ranks = 2 if sizes else 1
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    if not tiny_families.has_experts(name) and sizes.keys() & {"ep", "etp"}:
        pytest.skip("has no experts")
    model = with_adapters(tiny_families.make(name, tmp_path), name, lora)
    torch.save(_peft_updates(model), tmp_path / "reference.pt")
    for result in run_distributed(compare_on_gpus, ranks, tmp_path, lora, sizes, timeout_s=180):
        assert result["loss"] < BF16_LOSS and result["angle"] < BF16_ANGLE, result
