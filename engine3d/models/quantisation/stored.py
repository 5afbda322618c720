"""Quantised weights of files: fp8 in blocks is read, others are refused. A config may name one that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.models.files.safetensors_files import DTYPES, FP8, StoredTensor, TensorFiles
from engine3d.models.precision import BLOCK, QUANTISATION_CONFIG, scale_name
from engine3d.models.quantisation.mxfp4 import BLOCKS, MXFP4

QUANTISATION_KEY = "quantization_config"
QUANTISATION_KEYS = (QUANTISATION_KEY, "compression_config")
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


def check_quantisation(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], read: Collection[str]
) -> None:
    """Refuse quantised weights but fp8 blocks and MXFP4, and a second file that makes SGLang take weights for such.

    Args:
        directory: of the model.
        config: its config.json.
        stored: the tensors of its files.
        read: names of the tensors that the model is made of.

    Raises:
        UserError: names a tensor, the file, or the key of config.json.
    """
    in_fp8 = fp8_tensors(stored)
    in_mxfp4 = mxfp4_tensors(stored)
    method = named_method(config)
    if in_mxfp4 and method != "mxfp4":
        raise UserError(
            f"{directory / 'config.json'}: weights are {MXFP4}, such as {min(in_mxfp4)}; expected "
            f'{QUANTISATION_KEY} with quant_method "mxfp4", found {method or "nothing"}'
        )
    if (name := _quantised(stored, read, in_fp8 | in_mxfp4)) is not None:
        by = f" ({method})" if method else ""
        raise UserError(
            f"tensor {name} in {stored[name].path}: dtype {stored[name].dtype} of quantised weights{by}, expected "
            f"{', '.join(DTYPES)}, or {FP8} with a scale for each block of {BLOCK} x {BLOCK}; quantised weights of "
            "other formats must be converted first"
        )
    if (directory / _OTHER_FILE).exists():
        raise UserError(
            f"{directory / _OTHER_FILE}: names a quantisation, which SGLang would take for that of the weights, "
            "expected no such file"
        )
    if in_fp8 & set(read):
        _check_fp8_config(directory / "config.json", config)


def fp8_tensors(stored: Mapping[str, StoredTensor]) -> set[str]:
    """Names of the tensors in fp8."""
    return {name for name, tensor in stored.items() if tensor.dtype == FP8}


def mxfp4_tensors(stored: Mapping[str, StoredTensor]) -> set[str]:
    """Names of the tensors in MXFP4, or of their blocks where these are tensors of their own."""
    return {
        name
        for name, tensor in stored.items()
        if tensor.dtype == MXFP4 or (tensor.dtype == "U8" and name.endswith(BLOCKS))
    }


def _check_fp8_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that describes another quantisation than fp8 in blocks: SGLang would read the weights by it."""
    settings = config.get(QUANTISATION_KEY)
    if not isinstance(settings, dict) or config.get(QUANTISATION_KEYS[1]) is not None:
        raise UserError(
            f"{path}: weights are {FP8}, and {' or '.join(QUANTISATION_KEYS)} describes no fp8, expected "
            f"{QUANTISATION_KEY} {json.dumps(dict(QUANTISATION_CONFIG))}"
        )
    for key, expected in QUANTISATION_CONFIG.items():
        absent = expected if key in ("fmt", "activation_scheme") else None
        if (value := settings.get(key, absent)) != expected:
            raise UserError(
                f"{path}: {QUANTISATION_KEY}.{key}: expected {json.dumps(expected)}, found "
                f"{shortened(json.dumps(value, default=repr))}"
            )


def _quantised(stored: Mapping[str, StoredTensor], read: Collection[str], in_fp8: Collection[str] = ()) -> str | None:
    """The name of a tensor of quantised weights, among those `read` or the scales of any; None where there is none.

    Tensors `in_fp8` and their scales do not count.
    """
    for name in read:
        if name in stored and stored[name].dtype not in DTYPES and name not in in_fp8:
            return name
    known = {scale_name(name) for name in in_fp8}
    return next((name for name in stored if _SCALES.fullmatch(name) and name not in known), None)
