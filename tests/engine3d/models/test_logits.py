"""Every family, on every layout of up to four ranks, against transformers: logits, gradients and files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine3d.layout import Layout
from tests.support.distributed import run_distributed
from tests.support.proves import proves, run_of
from tests.support.tiny_families import CONFIGS, family_of, has_experts, make, may_cut, text_of

pytestmark = pytest.mark.processes

LENGTHS = (5, 7, 4)
BATCH, LENGTH = 2, 16
TOLERANCE = 1e-4

LAYOUTS = {
    1: [Layout()],
    2: [
        Layout(tp=2),
        Layout(pp=2),
        Layout(ep=2, dp=2),
        Layout(tp=2, ep=2),
        Layout(tp=2, etp=2),
    ],
    3: [Layout(pp=3)],
    4: [
        Layout(tp=4),
        Layout(pp=4),
        Layout(tp=2, pp=2),
        Layout(ep=4, dp=4),
        Layout(tp=2, ep=2, dp=2),
        Layout(tp=2, ep=4, dp=2),
        Layout(tp=2, etp=2, ep=2, dp=2),
        Layout(tp=4, ep=4),
        Layout(tp=4, etp=2, ep=2),
        Layout(tp=4, etp=4),
        Layout(pp=2, ep=2, dp=2),
        Layout(tp=2, pp=2, ep=2),
        Layout(tp=2, pp=2, etp=2),
    ],
}
EVERYWHERE = ("qwen3_moe", "deepseek_v3")
"""Models on all layouts in the shorter tests."""
SHORTER: dict[Layout, Collection[str]] = {
    Layout(): CONFIGS,
    Layout(pp=2): CONFIGS,
    Layout(tp=2): [name for name in CONFIGS if not has_experts(name)],
    Layout(tp=2, ep=2): [name for name in CONFIGS if has_experts(name)],
}
"""Models on a layout in the shorter tests besides those of `EVERYWHERE`."""


def on_all_layouts(test: Any) -> Any:
    """Mark a test that runs each model on each layout, with packed and padded rows."""
    for name in CONFIGS:
        layouts = [layout for of_size in LAYOUTS.values() for layout in of_size if may_cut(name, layout)]
        runs = [run_of(layout, rows) for layout in layouts for rows in ("packing", "padding")]
        test = proves(family_of(name), *runs)(test)
    return test


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every model, and beside each what transformers computes with it."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        model = make(name, root / name)
        # Every data-parallel rank has its own batch.
        tokens = torch.randint(
            0, text_of(config)["vocab_size"], (4, BATCH, LENGTH), generator=torch.Generator().manual_seed(7)
        )
        with torch.no_grad():
            fixed = [model(batch).logits for batch in tokens]
            packed = [
                torch.cat([model(sequence[None]).logits[0] for sequence in batch[0].split(LENGTHS)]) for batch in tokens
            ]
        loss = (fixed_logits := model(tokens[0]).logits).mul(coefficients(fixed_logits.shape)).sum()
        loss.backward()
        torch.save(
            {
                "tokens": tokens,
                "fixed": torch.stack(fixed),
                "packed": torch.stack(packed),
                "gradients": {file_name(name, key): value for key, value in hf_gradients(model).items()},
            },
            root / name / "reference.pt",
        )
    return root


def coefficients(shape: torch.Size) -> torch.Tensor:
    """Fixed weights that turn logits into a loss whose gradient reaches every parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def hf_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by the names that files have: transformers holds a layer's experts in two tensors."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.experts.gate_up_proj") and model.config.model_type != "gpt_oss":
            for expert, gradient in enumerate(parameter.grad):
                gate, up = gradient.chunk(2)
                prefix = f"{name.removesuffix('gate_up_proj')}{expert}."
                gradients |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("mlp.experts.down_proj") and model.config.model_type != "gpt_oss":
            for expert, gradient in enumerate(parameter.grad):
                gradients[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = gradient
        else:
            gradients[name] = parameter.grad
    return gradients


def file_name(model: str, tensor: str) -> str:
    """The name by which rules know a tensor that transformers names otherwise."""
    tensor = tensor.replace("model.language_model.", "model.")
    if family_of(model) in ("mixtral", "minimax_m2"):
        for theirs, stored in {
            ".mlp.": ".block_sparse_moe.",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        }.items():
            tensor = tensor.replace(theirs, stored)
    return tensor


def runs(world_size: int, *, further: bool) -> dict[Layout, list[str]]:
    """Models on the layouts of some ranks, in the shorter tests or only in the further ones."""
    return {
        layout: [
            name
            for name in CONFIGS
            if may_cut(name, layout) and further != (name in EVERYWHERE or name in SHORTER.get(layout, ()))
        ]
        for layout in LAYOUTS[world_size]
    }


@on_all_layouts
@pytest.mark.parametrize(
    ("world_size", "further"),
    [
        *((size, False) for size in (1, 2, 3)),
        *(pytest.param(size, True, marks=pytest.mark.release) for size in (2, 3, 4)),
        pytest.param(4, False, marks=pytest.mark.release),
    ],
)
def test_logits_and_files_equal_transformers(models: Path, world_size: int, further: bool, tmp_path: Path) -> None:
    names = runs(world_size, further=further)
    results = run_distributed(compare_all, world_size, models, names, tmp_path, timeout_s=300)
    for rank, measured in enumerate(results):
        assert len(measured) == sum(map(len, names.values()))
        for (layout, name), differences in measured.items():
            for kind, difference in differences.items():
                assert difference < TOLERANCE, f"rank {rank}, {layout}, {name}: {kind} differ by {difference}"
    for (layout, name), differences in sorted(results[-1].items()):
        print(f"{layout:24} {name:18} " + " ".join(f"{kind} {figure:.1e}" for kind, figure in differences.items()))


def compare_all(models: Path, names: dict[Layout, list[str]], exports: Path) -> dict[tuple[str, str], dict[str, float]]:
    from engine3d.training.megatron import parallel

    differences = {}
    for layout, of_layout in names.items():
        coordinates = parallel.initialise(layout, seed=1, timeout_s=300)
        from megatron.core import parallel_state

        for name in of_layout:
            export = exports / f"{layout}-{name}".replace(" ", "-")
            differences[str(layout), name] = compare(models / name, layout, coordinates, export)
        parallel_state.destroy_model_parallel()
    parallel.leave()
    return differences


def compare(directory: Path, layout: Layout, coordinates: Any, export: Path) -> dict[str, float]:
    from engine3d.models import build_model, export_weights, load_model_spec, load_weights

    reference = torch.load(directory / "reference.pt")
    spec = replace(load_model_spec(directory), expert_order="descending" if layout.pp > 1 else "ascending")
    model = build_model(spec, layout, torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert load_weights(model, spec, layout, coordinates, directory) == ()

    batch = reference["tokens"][coordinates.dp]
    fixed = forward(model, batch)
    packed = forward(model, batch[:1], lengths=LENGTHS)
    differences = {
        "fixed": difference(fixed, reference["fixed"][coordinates.dp], spec, coordinates),
        "packed": difference(packed, reference["packed"][coordinates.dp][None], spec, coordinates),
    }
    if layout.pp == 1 and layout.dp == 1:
        differences["gradients"] = gradient_difference(model, spec, layout, coordinates, reference)

    export_weights(model, spec, layout, coordinates, export, torch.float32, max_shard_bytes=50e3)
    check_same_bytes(directory, export)
    return differences


def difference(logits: torch.Tensor | None, expected: torch.Tensor, spec: Any, coordinates: Any) -> float:
    """Largest difference of this rank's columns; 0 on a rank without any."""
    if logits is None:
        return 0.0
    width = logits.shape[-1]
    mine = expected[..., coordinates.tp * width : (coordinates.tp + 1) * width]
    assert torch.equal(logits[..., mine.shape[-1] :], torch.zeros_like(logits[..., mine.shape[-1] :]))
    return float((logits[..., : mine.shape[-1]] - mine).abs().max())


def forward(model: Any, tokens: torch.Tensor, lengths: tuple[int, ...] | None = None) -> torch.Tensor | None:
    """Logits of this rank on the last pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = None
    if lengths is not None:
        bounds = torch.tensor((0, *lengths)).cumsum(0).int()
        packed = PackedSeqParams(
            "thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        )
    tp = model.config.tensor_model_parallel_size
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            hidden = torch.empty(tokens.shape[1] // tp, tokens.shape[0], model.config.hidden_size)
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        output = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, packed_seq_params=packed)
    if parallel_state.is_pipeline_last_stage():
        return output
    torch.distributed.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def gradient_difference(model: Any, spec: Any, layout: Layout, coordinates: Any, reference: dict[str, Any]) -> float:
    """Largest difference of this rank's gradients from transformers', relative to the tensor's largest gradient."""
    from megatron.core import parallel_state

    from engine3d.models.files.weights import rank_parameters

    tokens = reference["tokens"][0]
    logits: torch.Tensor = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    width = logits.shape[-1]
    mine = coefficients(reference["fixed"][0].shape)[..., coordinates.tp * width : (coordinates.tp + 1) * width]
    logits[..., : mine.shape[-1]].mul(mine).sum().backward()

    worst = 0.0
    for local, parameter in rank_parameters(model, spec, layout, coordinates):
        if local.buffer:
            continue
        gradient = parameter.grad
        assert gradient is not None
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        elif ".experts." in local.name and layout.edp > 1:
            torch.distributed.all_reduce(gradient, group=parallel_state.get_expert_data_parallel_group())
        for tensor_slice in local.slices:
            expected = reference["gradients"][tensor_slice.hf_name]
            right = expected[tuple(slice(*span) for span in tensor_slice.hf_box)]
            local_gradient = tensor_slice.to_hf(gradient[tuple(slice(*span) for span in tensor_slice.local_box)])
            worst = max(worst, float((local_gradient - right).abs().max() / expected.abs().max().clamp(min=1e-3)))
    return worst


def check_same_bytes(source: Path, export: Path) -> None:
    """The export has the source's tensors, bit for bit, and nothing else."""
    if torch.distributed.get_rank() == 0:
        before, after = read(source), read(export)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    torch.distributed.barrier()


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
