"""Reads what describes a role's tensors, `.metadata`, without trusting it: it is a pickle, and unpickling runs code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.checkpoint.manifest import Hash, Manifest
from engine3d.errors import UserError
from engine3d.input_files import FileError, is_file_name, read_bytes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from engine3d.models import ModelSpec

METADATA = ".metadata"

_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_DESCRIPTIONS, "_MEM_FORMAT_ENCODING"),
    (_DESCRIPTIONS, "BytesStorageMetadata"),
    (_DESCRIPTIONS, "ChunkStorageMetadata"),
    (_DESCRIPTIONS, "Metadata"),
    (_DESCRIPTIONS, "MetadataIndex"),
    (_DESCRIPTIONS, "StorageMeta"),
    (_DESCRIPTIONS, "TensorProperties"),
    (_DESCRIPTIONS, "TensorStorageMetadata"),
}
"""All that torch and Megatron-Core put into one, beside dtypes. None of these does anything but hold values."""


def read_metadata(checkpoint: Path, manifest: Manifest, role: str) -> Metadata:
    """What a role's files hold, and where.

    The bytes are unpickled only if they are those that were saved, and only into descriptions of tensors.

    Args:
        checkpoint: its directory.
        manifest: of the checkpoint.
        role: one of the manifest's.

    Raises:
        UserError: it is missing, not listed, changed since it was saved, or describes no tensors.
    """
    path = f"{role}/{METADATA}"
    where = f"checkpoint {checkpoint}: {path}"
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise UserError(f"{where} is not listed in the manifest")
    try:
        data = read_bytes(checkpoint / path, entry.size)
    except FileError as error:
        raise UserError(f"{where} {error.reason}") from None
    if Hash(data).checksum() != entry.checksum:
        raise UserError(f"{where} is damaged: its checksum is not that of the manifest")
    return parse_metadata(data, where)


def difference(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """How stored tensors, by name, differ from those of a model; the first difference, None if there is none."""
    for name, tensor in spec.hf_tensors.items():
        if name not in shapes:
            return f"it has no tensor {name}"
        if shapes[name] != tensor.shape:
            return f"tensor {name} has shape {list(shapes[name])}, expected {list(tensor.shape)}"
    if more := shapes.keys() - spec.hf_tensors.keys():
        return f"it has tensor {min(more)}, which the model has not"
    return None


def parse_metadata(data: bytes, where: str) -> Metadata:
    """Unpickle descriptions of tensors, and nothing else.

    Raises:
        UserError: it is something else; begins with `where`.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # what a pickle that is none raises is not defined
        raise UserError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, Metadata):
        raise UserError(f"{where} does not describe tensors")
    for stored in (found.storage_data or {}).values():
        if not is_file_name(name := str(getattr(stored, "relative_path", ""))):
            raise UserError(f"{where} names the file {name!r}, expected one of its own directory")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
