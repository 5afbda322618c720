"""Directories that hold a model in another form than the one read here, recognised by the names of their files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.input_files import FileError, read_json_object

ADAPTER = "adapter_config.json"
_EXPECTED = "a HuggingFace model directory: config.json and *.safetensors"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def no_directory(path: Path) -> UserError:
    """The error of a path that is no directory."""
    if path.is_file():
        form = "a GGUF file" if path.suffix == ".gguf" else "a file"
        return UserError(f"model {path}: is {form}; expected {_EXPECTED}")
    fetch, name = "", os.path.relpath(path)  # recipes have absolute paths
    if _HUB_NAME.fullmatch(name) and not path.parent.exists():
        fetch = f". Nothing is downloaded: for a model of the Hub, first run hf download {name} --local-dir DIRECTORY"
    return UserError(f"model {path}: no such directory; expected one with a HuggingFace config.json{fetch}")


def no_config(directory: Path) -> UserError:
    """The error of a directory without config.json: what it has in its place."""
    form = _form(directory)
    if form is None:
        below = sorted(path.parent.name for path in directory.glob("*/config.json"))
        if below:
            form = f"its folders {', '.join(below[:3])} have" if len(below) > 1 else f"its folder {below[0]} has"
        elif not any(directory.iterdir()):
            form = "it is empty"
    because = f" ({form})" if form else ""
    return UserError(f"model {directory}: has no config.json{because}; expected {_EXPECTED}")


def check_no_adapter(directory: Path) -> None:
    """Refuse a model with an adapter next to it, which transformers loads on top of its base model.

    Raises:
        UserError: there is one.
    """
    if (directory / ADAPTER).exists():
        raise UserError(
            f"model {directory}: holds {_adapter(directory)} next to a model, and transformers would load both; "
            f"expected the adapter merged into the model (peft's merge_and_unload), or no {ADAPTER}"
        )


def other_weights(directory: Path) -> str:
    """Weights of a directory that has none of the expected files, for an error; empty where it has none at all."""
    form = _form(directory)
    if form is None and (shards := sorted(directory.glob("*.safetensors"))):
        form = f"found {shards[0].name}" + (f" and {len(shards) - 1} more without an index" if shards[1:] else "")
    if form is None and (pickled := sorted((*directory.glob("*.bin"), *directory.glob("*.pt")))):
        form = (
            f"found {pickled[0].name}, which is not read: load it with transformers and save it again "
            "(save_pretrained writes safetensors)"
        )
    return f"; {form}" if form else ""


def _form(directory: Path) -> str | None:
    """The form of a model other than HuggingFace's, by the names of its files."""
    if (directory / ADAPTER).exists():
        return f"it holds {_adapter(directory)}: merge it into its model first (peft's merge_and_unload)"
    if (directory / "snapshots").is_dir():
        snapshots = sorted((directory / "snapshots").glob("*/config.json"))
        at = snapshots[0].parent if snapshots else directory / "snapshots" / "COMMIT"
        return f"it is a model's folder of the Hub's cache: its files are in {at}"
    if files := sorted(directory.glob("*.gguf")):
        return f"found {files[0].name}: GGUF is not read"
    for pattern in ("consolidated*.safetensors", "consolidated*.pth"):
        if files := sorted(directory.glob(pattern)):
            return f"found {files[0].name}: the publisher's own format is not read, take the HuggingFace one"
    return None


def _adapter(directory: Path) -> str:
    try:
        base = read_json_object(directory / ADAPTER).get("base_model_name_or_path")
    except FileError:
        base = None
    return f"an adapter of {shortened(base)}" if isinstance(base, str) and base else "an adapter"
