"""Contradictions within a checkpoint whose files are what its manifest says: somebody has written the manifest anew.

Bytes are compared by `verify`. Here the meaning of what describes them is: nothing large is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.checkpoint.hf import MODEL, model_files
from engine3d.checkpoint.manifest import MANIFEST, Manifest, is_step_directory, step_directory
from engine3d.checkpoint.metadata import METADATA, difference, read_metadata
from engine3d.checkpoint.piece_checksums import PieceChecksums
from engine3d.errors import UserError
from engine3d.models import load_model_spec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_WEIGHT = "weight/"


def contradictions_within(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Lines on what a manifest says of a checkpoint and its directory, roles and shards do not, or the other way round.

    Args:
        directory: of the checkpoint.
        manifest: of it.
    """
    if is_step_directory(directory) and directory.name != step_directory(directory.parent, manifest.step).name:
        yield f"{MANIFEST} is that of step {manifest.step}"
    described = {path.rpartition("/")[0] for entry in manifest.files if (path := entry.path).endswith(f"/{METADATA}")}
    if not manifest.roles and (manifest.recipe or is_step_directory(directory)):
        yield f"{MANIFEST} names no role"
    for role in sorted(described - manifest.roles.keys()):
        yield f"{role}/ is of no role that {MANIFEST} names"
    for role in manifest.roles:
        try:
            yield from _of_role(directory, manifest, role)
        except UserError as error:
            yield str(error).removeprefix(f"checkpoint {directory}: ")


def _of_role(directory: Path, manifest: Manifest, role: str) -> Iterator[str]:
    described = read_metadata(directory, manifest, role)
    if (line := _misplaced(directory, manifest, role, described)) is not None:
        yield line
    tensors = _weights(described)
    own = model_files(directory, role)
    model = own if own.is_dir() else directory / MODEL
    if not (model / "config.json").is_file():
        yield f"{model.name}/config.json is missing"
        return
    spec = load_model_spec(model, value_head=manifest.roles[role].value_head)
    if found := difference(spec, {name: tuple(stored.size) for name, stored in tensors.items()}):
        yield f"{role}/ does not fit {model.name}/config.json: {found}"


def _misplaced(directory: Path, manifest: Manifest, role: str, described: Metadata) -> str | None:
    """The first tensor whose pieces do not make it up, or first piece that its file cannot have."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes = {entry.path: entry.size for entry in manifest.files}
    checksums = PieceChecksums(directory / role)
    known: dict[str, set[tuple[int, int]]] = {}
    there: dict[str, set[tuple[int, ...]]] = {}
    for index, info in (described.storage_data or {}).items():
        file, last = f"{role}/{info.relative_path}", info.offset + info.length
        if not 0 <= info.offset <= last <= sizes.get(file, -1):
            return f"{role}/{METADATA} places {index.fqn} at bytes {info.offset:,} to {last:,} of {file}, outside it"
        if checksums.covers(info.relative_path):
            if info.relative_path not in known:
                pieces = checksums.of_file(info.relative_path)
                known[info.relative_path] = {(piece.start, piece.length) for piece in pieces}
            if (info.offset, info.length) not in known[info.relative_path]:
                return f"{file} has no piece at bytes {info.offset:,} to {last:,}, where {METADATA} places {index.fqn}"
        if index.offset is not None:
            there.setdefault(index.fqn, set()).add(tuple(index.offset))
    for key, stored in described.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        elements = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if elements != prod(stored.size) or {tuple(chunk.offsets) for chunk in stored.chunks} != there.get(key, set()):
            return f"{role}/{METADATA} has not all pieces of {key}"
    return None


def _weights(described: Metadata) -> dict[str, Any]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        key.removeprefix(_WEIGHT): stored
        for key, stored in described.state_dict_metadata.items()
        if key.startswith(_WEIGHT) and isinstance(stored, TensorStorageMetadata)
    }
