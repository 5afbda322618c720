"""Quantised weights, which are refused, and a quantisation that a config names of weights that are not quantised."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.models.safetensors_files import DTYPES, StoredTensor, TensorFiles

QUANTISATION_KEYS = ("quantization_config", "compression_config")
"""Keys of a config.json by which SGLang and transformers build quantised layers."""
_OTHER_FILE = "hf_quant_config.json"
_SCALES = re.compile(
    r".*\.(weight|input)_(scale(_inv|_2)?|zero_point|packed|shape|g_idx)"
    r"|.*\.(qweight|qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|nested_absmax|quant_state\..*))"
    r"|.*\.[kv]_scale"
)
"""Names of tensors that belong to quantised weights, of all methods that SGLang has."""


def named_method(config: Mapping[str, Any]) -> str | None:
    """The method of quantisation that a config.json names; None where it names none."""
    for key in QUANTISATION_KEYS:
        settings = config.get(key)
        if isinstance(settings, dict):
            return shortened(str(settings.get("quant_method") or settings.get("quant_algo") or "of an unnamed method"))
        if settings is not None:
            return shortened(str(settings))
    return None


def unquantised_overrides(directory: Path, config: Mapping[str, Any]) -> dict[str, None]:
    """Keys of a config.json that name a quantisation although no weight is quantised, for SGLang to read as null.

    Raises:
        UserError: the files of the weights cannot be read.
    """
    named = {key: None for key in QUANTISATION_KEYS if config.get(key) is not None}
    if not named:
        return {}
    with TensorFiles(directory) as files:
        return {} if _quantised(files.tensors, files.tensors) else named


def check_not_quantised(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], read: Collection[str]
) -> None:
    """Refuse quantised weights, and a second file that makes SGLang take the weights for quantised ones.

    Args:
        directory: of the model.
        config: its config.json.
        stored: the tensors of its files.
        read: names of the tensors that the model is made of.

    Raises:
        UserError: names a tensor or the file.
    """
    method = named_method(config)
    if (found := _quantised(stored, read)) is not None:
        by = f" ({method})" if method else ""
        raise UserError(
            f"tensor {found} in {stored[found].path}: dtype {stored[found].dtype} of quantised weights{by}, expected "
            f"{', '.join(DTYPES)}; quantised weights must be converted first"
        )
    if (directory / _OTHER_FILE).exists():
        raise UserError(
            f"{directory / _OTHER_FILE}: names a quantisation, and the weights are not quantised; expected no such "
            "file, by which SGLang would build quantised layers"
        )


def _quantised(stored: Mapping[str, StoredTensor], read: Collection[str]) -> str | None:
    """The name of a tensor of quantised weights, among those `read` or the scales of any; None where there is none."""
    found = next((name for name in read if name in stored and stored[name].dtype not in DTYPES), None)
    return next(filter(_SCALES.fullmatch, stored), None) if found is None else found
