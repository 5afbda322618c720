"""Quantised weights, and configs that name a quantisation of weights that are not quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.errors import UserError
from engine3d.models import (
    check_weights,
    initialise_random,
    load_model_spec,
    model_spec,
    sglang_overrides,
    weight_notes,
)
from engine3d.models.quantisation.stored import unquantised_overrides
from tests.support.tiny_families import CONFIGS

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def make(directory: Path, **config: Any) -> Path:
    """A model in bfloat16 whose config.json has further keys."""
    initialise_random(model_spec(CONFIGS["llama"]), directory, seed=1, dtype=torch.bfloat16)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | config))
    return directory


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantisation_left_in_the_config_is_ignored(tmp_path: Path, key: str) -> None:
    directory = make(tmp_path / "model", **{key: FP8})
    spec = load_model_spec(directory)
    check_weights(spec, directory)
    assert weight_notes(spec, directory) == [
        "config.json names a quantisation (fp8), and the weights are not quantised: it is ignored"
    ]
    assert sglang_overrides(spec.hf_config) == unquantised_overrides(directory, spec.hf_config) == {key: None}
    plain = load_model_spec(make(tmp_path / "plain"))
    assert sglang_overrides(plain.hf_config) == unquantised_overrides(tmp_path / "plain", plain.hf_config) == {}

    # As an engine reads the directory.
    from sglang.srt.configs.model_config import ModelConfig

    overrides = json.dumps(sglang_overrides(spec.hf_config))
    assert ModelConfig(str(directory), dtype="bfloat16").quantization
    assert ModelConfig(str(directory), dtype="bfloat16", model_override_args=overrides).quantization is None


@pytest.mark.parametrize(
    ("name", "tensor", "dtype"),
    [
        (f"{Q_PROJ}.weight", torch.zeros(512, 1, dtype=torch.uint8), "U8"),
        (f"{Q_PROJ}.weight_scale_inv", torch.ones(1, 1), "F32"),
        (f"{Q_PROJ}.qweight", torch.zeros(4, 32, dtype=torch.int32), "I32"),
        (f"{Q_PROJ}.weight_packed", torch.zeros(32, 4, dtype=torch.int32), "I32"),
        ("model.layers.0.mlp.down_proj.SCB", torch.ones(32), "F32"),
    ],
)
def test_quantised_weights_are_refused_by_name(tmp_path: Path, name: str, tensor: torch.Tensor, dtype: str) -> None:
    directory = make(tmp_path / "model", quantization_config=FP8)
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file)
    spec = load_model_spec(directory)
    with pytest.raises(UserError, match=rf"^tensor {name} in .*: dtype {dtype} of quantised weights \(fp8\), expected"):
        check_weights(spec, directory)
    assert unquantised_overrides(directory, spec.hf_config) == {}


def test_a_second_file_that_names_a_quantisation(tmp_path: Path) -> None:
    directory = make(tmp_path / "model")
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(UserError, match=r"hf_quant_config\.json: names a quantisation, which SGLang would take for"):
        check_weights(load_model_spec(directory), directory)
