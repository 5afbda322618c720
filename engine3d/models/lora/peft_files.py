"""Adapters in a directory of PEFT, from which training starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import read_json_object
from engine3d.models.files.safetensors_files import TensorFiles, read_header
from engine3d.models.lora.spec import AdapterSpec
from engine3d.models.rules import Box
from engine3d.startup.lazy_imports import torch

PREFIX = "base_model.model."
"""Beginning of a tensor's name in PEFT's files, before its name in the model."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base"
"""Key of a file's metadata with the fingerprint of the model that its adapters belong to."""
ADAPTERS = "adapters"
"""Folder of a model's export with adapters that are not merged into it."""
_DESCRIPTION = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "target_modules", "task_type"),
)
"""Keys of a config that say nothing of what loaded adapters compute; tensors say which modules have some."""
_STARTS = (None, True, False, "eva", "gaussian", "mica", "orthogonal")
"""Values of `init_lora_weights` with which PEFT leaves the model as it is. With others it takes the first adapters out
of its weights.
"""
_VARIANTS = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_bias", "lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config"),
    *("rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
    *("use_rslora", "velora_config"),
)
"""Keys of a config for variants of LoRA, none of which is supported."""


def peft_config(rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Make the config by which PEFT and SGLang know adapters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check_peft(directory: Path, spec: AdapterSpec) -> None:
    """Refuse a directory whose adapters are not those of a specification.

    Raises:
        UserError: names the file, and the key or tensor, its value and what would be accepted.
    """
    _check_config(directory / ADAPTER_CONFIG, read_json_object(directory / ADAPTER_CONFIG), spec)
    path = directory / ADAPTER_WEIGHTS
    stored = {name.removeprefix(PREFIX): tensor.shape for name, tensor in read_header(path).items()}
    expected = spec.hf_tensors
    if missing := sorted(expected.keys() - stored.keys()):
        raise UserError(f"{path}: has no {missing[0]}; expected a tensor of each module of lora.targets")
    if others := sorted(stored.keys() - expected.keys()):
        raise UserError(f"{path}: {others[0]} is of no module of lora.targets; expected {len(expected)} tensors")
    for name, tensor in expected.items():
        if stored[name] != tensor.shape:
            raise UserError(
                f"{path}: {name} has the shape {list(stored[name])}, expected {list(tensor.shape)}, as of adapters of "
                f"{spec.directory or spec.family.architecture}"
            )
    base = stored_base(path)
    if base is not None and spec.directory is not None and (fingerprint := _fingerprint(spec.directory)) != base:
        raise UserError(
            f"{path}: adapters of the model {base}, but {spec.directory} is {fingerprint}; expected adapters of "
            "this model, or the model that they belong to"
        )


def stored_base(path: Path) -> str | None:
    """Fingerprint of the model that the adapters in a file belong to; None in files of others than this project."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get(BASE)


@cache
def _fingerprint(model: Path) -> str:
    with TensorFiles(model) as files:
        return files.fingerprint()


def _check_config(path: Path, config: dict[str, Any], spec: AdapterSpec) -> None:
    for key, expected in {
        "peft_type": "LORA",
        "bias": "none",
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
    }.items():
        if (value := config.get(key)) != expected:
            setting = {"r": " (lora.rank)", "lora_alpha": " (lora.alpha)"}.get(key, "")
            raise UserError(f"{path}: {key}: expected {expected!r}{setting}, found {value!r}")
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise UserError(
            f"{path}: init_lora_weights: {start!r} changes the model itself; expected adapters that PEFT has converted "
            "(path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key in _VARIANTS and value:
            raise UserError(f"{path}: {key}={value!r} is not supported; expected null or false")
        if key not in (*_DESCRIPTION, *_VARIANTS, "init_lora_weights", "peft_type", "bias", "r", "lora_alpha"):
            raise UserError(f"{path}: unknown key {key}; expected those of peft.LoraConfig")


class PeftTensors:
    """The tensors of a directory of PEFT, by their names in the specification of the adapters.

    Args:
        directory: that `check_peft` has accepted.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(directory / ADAPTER_WEIGHTS, "pt")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read a part of a tensor, in the dtype of the file."""
        tensor: torch.Tensor = self._file.get_slice(PREFIX + name)[tuple(slice(start, stop) for start, stop in box)]
        return tensor
