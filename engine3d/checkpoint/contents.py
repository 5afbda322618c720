"""Contradictions within a checkpoint whose files are what its manifest says: somebody has rewritten the manifest.

Bytes are compared by `verify`. Here the meaning of what describes them is: nothing large is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksums
from engine3d.checkpoint.hf import MODEL, model_files
from engine3d.checkpoint.manifest import MANIFEST, Manifest, is_step_directory, step_directory
from engine3d.checkpoint.metadata import METADATA, Metadata, difference, read_metadata, stored_spec
from engine3d.errors import UserError


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
    role_model = model_files(directory, role)
    model = role_model if role_model.is_dir() else directory / MODEL
    if not (model / "config.json").is_file():
        yield f"{model.name}/config.json is missing"
        return
    spec = stored_spec(model, manifest.roles[role])
    if mismatch := difference(spec, {name: tensor.shape for name, tensor in described.weights.items()}):
        yield f"{role}/ does not fit {model.name}/config.json: {mismatch}"


def _misplaced(directory: Path, manifest: Manifest, role: str, described: Metadata) -> str | None:
    """The first tensor whose chunks do not cover it, or the first chunk that its file cannot have."""
    sizes = {entry.path: entry.size for entry in manifest.files}
    checksums = ChunkChecksums(directory / role)
    known: dict[str, set[tuple[int, int]]] = {}
    there: dict[str, set[tuple[int, ...]]] = {}
    for stored in described.stored:
        file, key, first, last = f"{role}/{stored.file}", stored.key, stored.start, stored.stop
        if not 0 <= first <= last <= sizes.get(file, -1):
            return f"{role}/{METADATA} places {key} at bytes {first:,} to {last:,} of {file}, outside it"
        if checksums.covers(stored.file):
            if stored.file not in known:
                known[stored.file] = {(chunk.start, chunk.length) for chunk in checksums.of_file(stored.file)}
            if (first, stored.length) not in known[stored.file]:
                return f"{file} has no chunk at bytes {first:,} to {last:,}, where {METADATA} places {key}"
        there.setdefault(key, set()).add(stored.offset)
    for key, tensor in described.tensors.items():
        elements = sum(prod(chunk.shape) for chunk in tensor.chunks)
        if elements != prod(tensor.shape) or {chunk.offset for chunk in tensor.chunks} != there.get(key, set()):
            return f"{role}/{METADATA} lacks chunks of {key}"
    return None
