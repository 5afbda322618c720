"""Qwen3.5: forms of its files, and the tensors next to its language model, which exports have as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.checkpoint.hf import export_checkpoint, import_checkpoint
from engine3d.errors import UserError
from engine3d.models import check_weights, initialise_random, load_model_spec, model_spec, weight_notes
from engine3d.models.files.safetensors_files import INDEX_FILE, SINGLE_FILE
from hybridflow.config.initial_model import initial_spec
from hybridflow.roles.config import CreateModel, ModelConfig
from tests.support.tiny_families import CONFIGS, add_multi_token_layer, make

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.language_model.layers.0.mlp.experts."


def tensors_of(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def rewrite(directory: Path, tensors: Tensors) -> None:
    for path in (*directory.glob("*.safetensors"), directory / INDEX_FILE):
        path.unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SINGLE_FILE)


def with_fused_experts(tensors: Tensors) -> Tensors:
    """The tensors of a model of 4 layers in the form that published files have."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(4):
        experts = EXPERTS.replace(".0.", f".{layer}.")
        gate, up, down = (
            torch.stack([tensors[f"{experts}{expert}.{linear}_proj.weight"] for expert in range(8)])
            for linear in ("gate", "up", "down")
        )
        fused |= {f"{experts}gate_up_proj": torch.cat([gate, up], 1), f"{experts}down_proj": down}
    return fused


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5-tied"])
def test_exports_have_the_vision_tower_and_layers_for_multi_token_prediction(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make(name, model)
    add_multi_token_layer(model)
    before = tensors_of(model)
    assert any(tensor.startswith("model.visual.") for tensor in before)
    assert weight_notes(load_model_spec(model), model) == []
    import_checkpoint(model, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000000"
    export_checkpoint(checkpoint, tmp_path / "export", base=model, max_shard_bytes=20e3)
    assert equal(tensors_of(tmp_path / "export"), before)
    assert config_of(tmp_path / "export") == config_of(model)
    export_checkpoint(checkpoint, tmp_path / "served", base=model, multi_token=False)
    without = {tensor: values for tensor, values in before.items() if not tensor.startswith("mtp.")}
    assert equal(tensors_of(tmp_path / "served"), without)

    with pytest.raises(UserError, match=r"is without the vision tower of its model; expected --base of that model$"):
        export_checkpoint(checkpoint, tmp_path / "none")
    with pytest.raises(UserError, match=r"^export: precision=fp8 was not tried with Qwen3_5.*; expected none$"):
        export_checkpoint(checkpoint, tmp_path / "fp8", base=model, precision="fp8")


def test_the_parts_of_a_config_have_the_dtype_of_an_export(tmp_path: Path) -> None:
    make("qwen3_5-tied", tmp_path / "model")
    config = config_of(tmp_path / "model")
    config["text_config"]["dtype"] = "float32"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    import_checkpoint(tmp_path / "model", tmp_path)
    export_checkpoint(tmp_path / "step-00000000", tmp_path / "export", base=tmp_path / "model", dtype="bfloat16")
    exported = config_of(tmp_path / "export")
    assert (exported["dtype"], exported["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert load_model_spec(tmp_path / "export").sizes == load_model_spec(tmp_path / "model").sizes


@pytest.mark.slow
def test_experts_in_two_tensors_of_a_layer_are_read_as_experts_with_three_each(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make("qwen3_5_moe", model)
    separate = tensors_of(model)
    rewrite(model, fused := with_fused_experts(separate))
    spec = load_model_spec(model)
    check_weights(spec, model)
    assert weight_notes(spec, model) == []
    import_checkpoint(model, tmp_path / "checkpoints")
    export_checkpoint(tmp_path / "checkpoints" / "step-00000000", tmp_path / "export", base=model)
    assert equal(tensors_of(tmp_path / "export"), separate)

    rewrite(model, {**fused, f"{EXPERTS}0.up_proj.weight": separate[f"{EXPERTS}0.up_proj.weight"]})
    with pytest.raises(UserError, match=r"^tensor model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight: in .*, and as"):
        check_weights(spec, model)
    rewrite(model, {**fused, f"{EXPERTS}gate_up_proj": fused[f"{EXPERTS}gate_up_proj"][:, 1:]})
    with pytest.raises(UserError, match=r"experts\.gate_up_proj in .*: 47 rows of gate and up, expected an even"):
        check_weights(spec, model)


def test_what_is_not_the_model_is_refused_in_one_line(tmp_path: Path) -> None:
    model, config = tmp_path / "model", CONFIGS["qwen3_5_moe"]
    make("qwen3_5_moe", model)
    rewrite(model, {name: tensor for name, tensor in tensors_of(model).items() if "visual" not in name})
    with pytest.raises(UserError, match=r"no tensor model\.visual\.\*, expected the vision tower of Qwen3_5MoeForCond"):
        check_weights(load_model_spec(model), model)
    with pytest.raises(UserError, match=r"Qwen3_5MoeForConditionalGeneration was not tried with a scalar head; expect"):
        model_spec(config, value_head=True)
    line = r"Qwen3_5MoeForConditionalGeneration has a vision tower, which is not made; expected a directory with its w"
    with pytest.raises(UserError, match=line):
        initialise_random(model_spec(config), tmp_path / "made", seed=1, dtype=torch.float32)
    with pytest.raises(UserError, match=line):
        initial_spec(ModelConfig(create=CreateModel(config=config)))
