"""Directories in fp8 as others publish theirs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine3d.models import load_model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.files.weights import finish_export
from engine3d.models.precision import quantise, scale_name


def publish(model: Path, directory: Path) -> None:
    """Write a model in fp8 with scales that are no powers of two, and a config that names no unquantised modules.

    Scales of models with latent attention are in float32 and their kv_b_proj is quantised, as DeepSeek-V3's. Those of
    others are in bfloat16, as Qwen3's.
    """
    spec, stored = load_model_spec(model), {}
    with TensorFiles(model) as files:
        for key, tensor in spec.hf_tensors.items():
            values = files.read(key, tuple((0, size) for size in tensor.shape))
            if not tensor.fp8 and not key.endswith("kv_b_proj.weight"):
                stored[key] = values.to(torch.float32 if tensor.buffer else torch.bfloat16)
                continue
            stored[key], scales = quantise(values)
            scales *= 0.7 + 0.2 * torch.rand(scales.shape, generator=torch.Generator().manual_seed(len(stored)))
            stored[scale_name(key)] = scales if spec.sizes.latent is not None else scales.bfloat16()
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir()
    save_file(stored, partial / "model.safetensors")
    finish_export(spec, torch.bfloat16, partial, directory, "fp8")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]["modules_to_not_convert"]
    (directory / "config.json").write_text(json.dumps(config))
