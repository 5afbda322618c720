"""A layer for multi-token prediction is trained as plain PyTorch trains it, and the policy never notices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine3d.checkpoint.hf import copy_model_files, export_checkpoint
from engine3d.checkpoint.manifest import RoleSummary, write_manifest
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import load_model_spec, model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.rules import TensorSlice
from engine3d.training.config import LayoutConfig, MtpConfig, OptimizerConfig, TrainConfig
from engine3d.training.megatron.settings import check_options
from engine3d.training.passes.sequences import Sequences
from tests.engine3d.checkpoint.writing.test_save import save
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.gradients import gradients, slices
from tests.support.proves import proves, runs_of
from tests.support.small_checkpoints import describe

pytestmark = pytest.mark.processes

SETTINGS = OptimizerConfig(lr=1e-2, min_lr=1e-3, schedule="cosine", warmup_steps=2, decay_steps=8, clip_grad=0.5)
MTP = MtpConfig(lr=2e-2, clip_grad=0.1)
TEMPERATURE = 0.7
UPDATES = 3
LAYOUTS: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{}, {"tp": 2}, {"ep": 2}, {"etp": 2}], 4: [{"tp": 2, "ep": 2}]}
FAMILIES = ("deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.long))


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a layer for multi-token prediction unlike the layers of the model."""
    directory = tmp_path_factory.mktemp("model") / str(request.param)
    tiny_families.make(request.param, directory)
    tiny_families.add_drafting_layer(directory)
    file = directory / "multi_token.safetensors"
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: values if name.endswith("bias") else values * (1 + 0.3 * torch.randn(values.shape, generator=generator))
        for name, values in load_file(file).items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    return directory


def _samples() -> tuple[list[list[int]], list[list[float]]]:
    """Samples, and their tokens' weights, which are 0 for some of the first and of the others."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, *torch.randint(4, 20, (8,), generator=generator).tolist()]
    samples = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]
    weights = [
        [0.0, *(torch.rand(length - 1, generator=generator) > 0.3).float().mul(0.01).tolist()] for length in lengths
    ]
    return samples, weights


def _engine(directory: Path, sizes: dict[str, Any], world_size: int, *, load: bool = True, **settings: Any) -> Any:
    from engine3d.training.engine import TrainEngine

    arguments = {"dtype": "float32", "micro_batch_tokens": 48, "optimizer": SETTINGS} | settings
    config = TrainConfig(layout=LayoutConfig(**sizes), **arguments)
    return TrainEngine(directory, config, Layout.of_world(world_size, **sizes), seed=1, load=load)


def _of_rank(engine: Any) -> Sequences:
    samples, weights = _samples()
    mine = range(engine.coordinates.dp, len(samples), engine.layout.dp)
    column = torch.tensor([weight for index in mine for weight in weights[index]])
    return Sequences.of([samples[index] for index in mine], weights=column)


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = ((0.01 * outputs.entropy - outputs.logprobs) * columns["weights"]).sum()
    return loss, loss.detach()


def _updates(engine: Any, count: int = UPDATES) -> list[Any]:
    sequences = _of_rank(engine)
    return [engine.update(sequences, _loss, temperature=TEMPERATURE, with_entropy=True) for _ in range(count)]


Seen = dict[str, Any]


def _train(directory: Path, world_size: int, layouts: list[dict[str, Any]], settings: dict[str, Any]) -> list[Seen]:
    """Train with and without the layer. Return the first gradient of the layer, and what the policy's updates were."""
    seen = []
    for sizes in layouts:
        result: Seen = {}
        for mtp in (None, MTP):
            engine = _engine(directory, sizes, world_size, mtp=mtp, **settings)
            updates = _updates(engine, 1)
            result[f"gradients {mtp is not None}"] = gradients(engine)
            updates += _updates(engine, UPDATES - 1)
            result[f"policy {mtp is not None}"] = [
                *(torch.stack([*update.loss_outputs, torch.tensor(update.grad_norm)]) for update in updates),
                *(parameter.detach().clone() for parameter in engine.module.parameters()),
            ]
            result["mtp"] = [update.mtp for update in updates]
            engine.close()
        seen.append(result)
    return seen


@proves("deepseek_v3", *runs_of(LAYOUTS, "packing mtp"), "padding mtp", "packing recomputation mtp")
@proves("glm4_moe", *runs_of(LAYOUTS, "packing mtp"), "padding mtp", "packing recomputation mtp")
@pytest.mark.parametrize(
    ("world_size", "layouts", "settings"),
    [
        (1, LAYOUTS[1], {}),
        (1, LAYOUTS[1], {"packing": False}),
        (1, LAYOUTS[1], {"recompute": "full"}),
        (1, LAYOUTS[1], {"dtype": "bfloat16"}),
        (2, LAYOUTS[2], {}),
        pytest.param(4, LAYOUTS[4], {}, marks=pytest.mark.long),
    ],
)
def test_the_layer_learns_as_in_plain_pytorch_and_the_policy_as_without_it(
    directory: Path, world_size: int, layouts: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    loss, expected = _reference(directory)
    norm = float(torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt())
    assert norm > 2 * MTP.clip_grad
    expected = {name: gradient * (MTP.clip_grad / (norm + 1e-6)) for name, gradient in expected.items()}
    ranks = run_distributed(_train, world_size, directory, world_size, layouts, settings, timeout_s=300)
    for number, sizes in enumerate(layouts):
        compared: dict[str, torch.Tensor] = {name: torch.zeros_like(values) for name, values in expected.items()}
        for rank in ranks:
            seen = rank[number]
            for one, other in zip(seen["policy False"], seen["policy True"], strict=True):
                assert torch.equal(one, other), sizes
            of_policy: list[tuple[TensorSlice, torch.Tensor]] = []
            for slice_, gradient in seen["gradients True"]:
                if slice_.hf_name in expected and "dtype" in settings:
                    compared[slice_.hf_name][slices(slice_.hf_box)] = 1
                elif slice_.hf_name in expected:
                    box = slices(slice_.hf_box)
                    largest = float(expected[slice_.hf_name].abs().max())
                    difference = (gradient - expected[slice_.hf_name][box]).abs().max()
                    assert float(difference) < 1e-5 * largest, (sizes, slice_.hf_name, float(difference) / largest)
                    compared[slice_.hf_name][box] = 1
                else:
                    of_policy.append((slice_, gradient))
            for (one_slice, one), (other_slice, other) in zip(seen["gradients False"], of_policy, strict=True):
                assert one_slice == other_slice and torch.equal(one, other), (sizes, one_slice.hf_name)
            losses = [update.loss for update in seen["mtp"]]
            assert losses[0] == pytest.approx(loss, rel=0.02 if "dtype" in settings else 1e-5)
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # the first rate is 0
            assert losses[2] < losses[1] - 0.02
            assert seen["mtp"][0].grad_norm == pytest.approx(norm, rel=0.1 if "dtype" in settings else 1e-5)
        assert all(bool(values.all()) for values in compared.values()), sizes


def _broken(directory: Path) -> tuple[list[bool], bool, float, bool]:
    """Updates of a policy next to a layer whose first gradient is not finite, and the layer's weights after these."""
    policies, applied = [], []
    for mtp in (None, MTP):
        engine = _engine(directory, {}, 1, mtp=mtp)
        if engine.mtp is not None:
            weight = engine.mtp.enorm.weight.data
            stored, weight[:] = weight.clone(), torch.inf
        first = _updates(engine, 1)[0]
        if engine.mtp is not None:
            weight[:] = stored
            assert first.mtp.loss != first.mtp.loss and first.mtp.grad_norm != first.mtp.grad_norm
        later = _updates(engine, 2)
        applied += [update.applied for update in (first, *later)]
        policies.append([parameter.detach().clone() for parameter in engine.module.parameters()])
        if engine.mtp is not None:
            loss, finite = later[-1].mtp.loss, all(bool(p.isfinite().all()) for p in engine.mtp.parameters())
        engine.close()
    return applied, all(map(torch.equal, *policies)), loss, finite


def test_a_gradient_of_the_layer_that_is_not_finite_counts_as_none(directory: Path) -> None:
    [(applied, alike, loss, finite)] = run_distributed(_broken, 1, directory, timeout_s=300)
    assert all(applied) and alike and finite and 0 < loss < 10


def _saved_and_loaded(directory: Path, root: Path) -> tuple[RoleSummary, bool]:
    """An update after a checkpoint, in the engine that wrote it and in one that read it. True if they are alike."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    engine = _engine(directory, {"ep": 2}, 2, mtp=MTP)
    _updates(engine, 2)
    checkpoint = EngineCheckpoint(engine)
    save(engine, checkpoint, root / "checkpoint" / "actor", background=False)
    summary = checkpoint.summary
    engine.export(root / "exported", dtype=torch.float32)
    engine.offload()
    (last,) = _updates(engine, 1)
    expected = [parameter.detach().clone() for parameter in engine.weighted.parameters()]
    engine.close()
    resumed = _engine(directory, {"ep": 2}, 2, load=False, mtp=MTP)
    EngineCheckpoint(resumed).load(root / "checkpoint" / "actor")
    (again,) = _updates(resumed, 1)
    alike = all(torch.equal(one, other) for one, other in zip(expected, resumed.weighted.parameters(), strict=True))
    alike = alike and (again.mtp, again.grad_norm) == (last.mtp, last.grad_norm)
    resumed.close()
    other = _engine(directory, {"tp": 2}, 2, load=False, mtp=MTP)
    EngineCheckpoint(other).load(root / "checkpoint" / "actor")
    other.export(root / "exported-by-other", dtype=torch.float32)
    other.close()
    return summary, alike


@proves("deepseek_v3", "ep dp packing checkpoints mtp")
@proves("glm4_moe", "ep dp packing checkpoints mtp")
def test_a_checkpoint_has_the_layer_and_its_optimizer(directory: Path, tmp_path: Path) -> None:
    repeated = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    model = _with_copies(directory, tmp_path / "model", repeated)
    ranks = run_distributed(_saved_and_loaded, 2, model, tmp_path, timeout_s=300)
    assert all(alike for _, alike in ranks)
    summary = ranks[0][0]
    assert summary.mtp
    checkpoint = tmp_path / "checkpoint"
    copy_model_files(model, checkpoint)
    recipe = {"model": {"path": str(model)}}
    write_manifest(checkpoint, describe(checkpoint, roles={"actor": summary}, recipe=recipe))
    export_checkpoint(checkpoint, tmp_path / "from-checkpoint")
    stored, exported = _tensors(model), _tensors(tmp_path / "exported")
    for name in ("exported-by-other", "from-checkpoint"):
        other = _tensors(tmp_path / name)
        assert other.keys() == exported.keys() == stored.keys()
        assert all(torch.equal(other[key], exported[key]) for key in exported), name
    of_layer = {key for key in stored if key.startswith("model.layers.4.")}
    assert all(torch.equal(stored[key], exported[key]) == key.endswith("correction_bias") for key in of_layer)
    copies = {f"model.layers.4.{name}": of_model for name, of_model in repeated.items()}
    assert all(torch.equal(exported[name], exported[of_model]) for name, of_model in copies.items())
    export_checkpoint(checkpoint, tmp_path / "without", multi_token=False)
    assert _tensors(tmp_path / "without").keys() == stored.keys() - of_layer
    export_checkpoint(checkpoint, tmp_path / "by-base", base=directory)
    model.rename(tmp_path / "moved")
    export_checkpoint(checkpoint, tmp_path / "by-itself")
    for name in ("by-base", "by-itself"):
        assert _tensors(tmp_path / name).keys() == stored.keys() - copies.keys()


def _with_copies(directory: Path, target: Path, repeated: dict[str, str]) -> Path:
    """The same model, with files that repeat some of its tensors within the layer."""
    copytree(directory, target)
    tensors = _tensors(directory)
    copies = {f"model.layers.4.{name}": tensors[of_model] for name, of_model in repeated.items()}
    save_file(copies, target / "copies.safetensors", metadata={"format": "pt"})
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(copies, "copies.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: values for file in directory.glob("*.safetensors") for name, values in load_file(file).items()}


# The reference ----------------------------------------------------------------------------------------------------


def _reference(directory: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The layer's loss and gradient with the weights of the files, by the names of their tensors.

    transformers computes states of the policy, and the layer's own decoder layer as a model of one layer.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    policy: Any = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    config = json.loads((directory / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    stored = {
        name.removeprefix(prefix): values for name, values in load_file(directory / "multi_token.safetensors").items()
    }
    inputs = {name: stored.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
    layer: Any = AutoModelForCausalLM.from_pretrained(_one_layer(directory, config, stored), **options).eval().model
    for values in inputs.values():
        values.requires_grad_()

    def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values, weight.shape, weight, config["rms_norm_eps"])

    samples, weights = _samples()
    loss, tokens = torch.zeros(()), 0
    for sample, of_sample in zip(samples, weights, strict=True):
        if len(sample) < 3:
            continue
        ids = torch.tensor([sample])
        with torch.no_grad():
            states = policy.model(ids).last_hidden_state[:, :-1]
            embedded = policy.model.embed_tokens(ids)[:, 1:]
        joined = torch.cat([norm(embedded, inputs["enorm"]), norm(states, inputs["hnorm"])], -1)
        hidden = layer(inputs_embeds=joined @ inputs["eh_proj"].T).last_hidden_state[:, :-1]
        logprobs = (hidden @ policy.lm_head.weight.detach().T / TEMPERATURE).log_softmax(-1)
        learned = torch.tensor(of_sample[2:]) != 0
        loss = loss - logprobs[0].gather(1, ids[0, 2:, None])[:, 0][learned].sum()
        tokens += int(learned.sum())
    loss = loss / tokens
    loss.backward()
    result: dict[str, Any] = {f"{prefix}{name}.weight": values.grad for name, values in inputs.items()}
    for name, parameter in layer.named_parameters():
        if name == "norm.weight":
            result[f"{prefix}shared_head.norm.weight"] = parameter.grad
        elif name.endswith("experts.gate_up_proj"):
            for expert, gradient in enumerate(parameter.grad):
                for kind, half in zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True):
                    result[f"{prefix}mlp.experts.{expert}.{kind}.weight"] = half
        elif name.endswith("experts.down_proj"):
            for expert, gradient in enumerate(parameter.grad):
                result[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = gradient
        elif name.startswith("layers.0."):
            result[prefix + name.removeprefix("layers.0.")] = parameter.grad
    assert len(result) == len(inputs) + len([name for name in stored if not name.endswith("bias") or "proj" in name])
    return float(loss.detach()), result


def _one_layer(directory: Path, config: dict[str, Any], stored: dict[str, torch.Tensor]) -> Path:
    target = directory.parent / f"{directory.name}-one-layer"
    if not target.exists():
        target.mkdir()
        one = config | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
        (target / "config.json").write_text(json.dumps(one))
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        tensors = {f"model.layers.0.{name}": values for name, values in stored.items() if "shared_head" not in name}
        tensors["model.norm.weight"] = stored["shared_head.norm.weight"]
        tensors |= {name: torch.zeros(vocabulary, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "layout", "line"),
    [
        ({"lora": LoraConfig()}, Layout(), "mtp was not tried with lora; expected null, or mtp=null"),
        ({"precision": "fp8"}, Layout(), "mtp was not tried with precision; expected null, or mtp=null"),
        ({"logits_tokens": 8}, Layout(), "mtp was not tried with logits_tokens; expected null, or mtp=null"),
        ({"routing_replay": "update"}, Layout(), "mtp was not tried with routing_replay; expected none, or mtp=null"),
        (
            {"optimizer": OptimizerConfig(offload=True)},
            Layout(),
            "mtp was not tried with optimizer.offload; expected false, or mtp=null",
        ),
        (
            {"megatron": {"moe_aux_loss_coeff": 0.1}},
            Layout(),
            "mtp was not tried with megatron.moe_aux_loss_coeff; expected no such option, or mtp=null",
        ),
        ({}, Layout(pp=2), "mtp was not tried with layout.pp=2; expected 1, or mtp=null"),
        ({}, Layout(cp=2), "mtp was not tried with layout.cp=2; expected 1, or mtp=null"),
    ],
)
def test_a_layer_is_trained_with_what_was_tried_alone(
    directory: Path, settings: dict[str, Any], layout: Layout, line: str
) -> None:
    spec, config = load_model_spec(directory), TrainConfig(dtype="float32", mtp=MTP, **settings)
    with pytest.raises(UserError) as error:
        check_options(config, spec, layout, transformer_engine=False)
    assert str(error.value) == line


def test_a_layer_that_is_none_is_not_trained(tmp_path: Path) -> None:
    config = TrainConfig(dtype="float32", mtp=MTP)
    tiny_families.make("glm4_moe", tmp_path / "glm")
    language = load_model_spec(tmp_path / "glm")
    for spec, transformer_engine, line in (
        (language, False, "mtp: model: num_nextn_predict_layers="),
        (language, True, "mtp was not tried on GPUs; expected null, or placement on a CPU"),
        (replace(language, value_head=True), False, "mtp with a scalar head: expected null"),
        (model_spec(tiny_families.CONFIGS["qwen3_moe"]), False, "mtp was not tried with Qwen3MoeForCausalLM; expected"),
    ):
        with pytest.raises(UserError) as error:
            check_options(config, spec, Layout(), transformer_engine=transformer_engine)
        assert str(error.value).startswith(line)
