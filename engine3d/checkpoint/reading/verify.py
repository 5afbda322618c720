"""Comparison of every file of a checkpoint with its checksum, and the tensors that a damaged one loses."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path, PurePosixPath

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksum, ChunkChecksums
from engine3d.checkpoint.manifest import FileEntry, Hash, Manifest, read_manifest, verify_hint, visible_damage
from engine3d.checkpoint.metadata import METADATA, StoredChunk, read_metadata
from engine3d.errors import UserError

_SHARD = ".distcp"
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that is not what was saved.

    Args:
        file: its path in the checkpoint.
        reason: what is wrong with it, in words that follow its name.
        tensors: keys of what lies in it, such as "weight/lm_head.weight", in the order of the file. Where the file was
            cut off, only what lies past its end. Empty for a file that holds no tensors, and where the `.metadata` of
            its role, which knows them, is damaged itself.
    """

    file: str
    reason: str
    tensors: tuple[str, ...] = ()


def verify_checkpoint(directory: Path, *, threads: int = 8) -> list[Damage]:
    """Read all of a checkpoint.

    Args:
        directory: of the checkpoint.
        threads: files that are read at the same time.

    Returns:
        What is damaged, in the manifest's order. Nothing if the checkpoint is what was saved.

    Raises:
        UserError: it has no manifest that can be read.
    """
    manifest = read_manifest(directory)
    reasons = _reasons(directory, manifest.files, threads)
    stored: dict[str, list[StoredChunk]] = {}
    unreadable: list[Damage] = []
    for role in manifest.roles:
        path = f"{role}/{METADATA}"
        if path in reasons:
            continue
        try:
            stored |= _stored(directory, manifest, role)
        except UserError as error:
            unreadable.append(Damage(path, str(error).removeprefix(f"checkpoint {directory}: {path} ")))
    damages = [
        Damage(entry.path, reasons[entry.path], _lost(directory / entry.path, stored.get(entry.path, ()), entry))
        for entry in manifest.files
        if entry.path in reasons
    ]
    unlisted = sorted(stored.keys() - {entry.path for entry in manifest.files})
    return [
        *damages,
        *unreadable,
        *(Damage(path, "is not listed in the manifest", _keys(stored[path])) for path in unlisted),
    ]


def damaged_description(directory: Path) -> str | None:
    """Verify all that describes a checkpoint. The shards of its tensors, most of its bytes, are not read.

    Returns:
        The first damaged file and what is wrong with it.

    Raises:
        UserError: the checkpoint has no manifest that can be read.
    """
    files = [entry for entry in read_manifest(directory).files if not entry.path.endswith(_SHARD)]
    return next((f"{file} {reason}" for file, reason in _reasons(directory, files, 1).items()), None)


def damaged_shard(directory: Path, role: str | None = None, *, most_bytes: int = 0) -> str | None:
    """Verify the shards whose chunks have no checksums of their own, as in older formats, by reading all of them.

    Args:
        directory: of the checkpoint.
        role: whose shards; those of all roles if None.
        most_bytes: shards that are no larger in all are read too where their chunks have checksums. Of larger ones the
            ranks that load them compare each chunk, on all hosts at the same time.

    Returns:
        The first damaged file and what is wrong with it.
    """
    shards = [
        entry
        for entry in read_manifest(directory).files
        if entry.path.endswith(_SHARD) and (role is None or entry.path.startswith(f"{role}/"))
    ]
    if sum(entry.size for entry in shards) > most_bytes:
        shards = [
            entry
            for entry in shards
            if not ChunkChecksums((directory / entry.path).parent).covers(PurePosixPath(entry.path).name)
        ]
    return next((f"{file} {reason}" for file, reason in _reasons(directory, shards, 8).items()), None)


def check_described(directory: Path, role: str) -> None:
    """Before a role's tensors are read, each of which is then compared by itself: all that describes them.

    Raises:
        UserError: names the damaged file.
    """
    if damage := damaged_description(directory) or damaged_shard(directory, role):
        raise UserError(f"checkpoint {directory}: {damage}; {verify_hint(directory)}")


def _reasons(directory: Path, files: Sequence[FileEntry], threads: int) -> dict[str, str]:
    """Why each damaged file is not what was saved."""
    largest_first = sorted(files, key=lambda entry: -entry.size)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")
    try:
        reasons = pool.map(partial(_reason, directory), largest_first)
        return {entry.path: reason for entry, reason in zip(largest_first, reasons, strict=True) if reason}
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for the files that are being read, and for no others


def _reason(directory: Path, entry: FileEntry) -> str | None:
    if reason := visible_damage(directory, entry):
        return reason
    path = directory / entry.path
    checksums = ChunkChecksums(path.parent)
    try:
        chunks = checksums.of_file(path.name) if entry.path.endswith(_SHARD) and checksums.covers(path.name) else []
        computed, other = _checksums(path, chunks)
    except UserError as error:
        return f"cannot be compared: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if computed != entry.checksum:
        return "is damaged: its checksum is not that of the manifest"
    if other is not None:
        last = other.start + other.length
        return f"holds other chunks than were saved: bytes {other.start:,} to {last:,} have another checksum"
    return None


def _checksums(path: Path, chunks: Sequence[ChunkChecksum]) -> tuple[str, ChunkChecksum | None]:
    """The checksum of a file, and the first of its chunks whose checksum differs. The file is read once."""
    file_hash, other = Hash(), None
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        for chunk in chunks:
            _read(file, block, chunk.start, file_hash)
            chunk_hash = Hash()
            _read(file, block, chunk.start + chunk.length, file_hash, chunk_hash)
            if other is None and chunk_hash.checksum() != chunk.checksum:
                other = chunk
        _read(file, block, None, file_hash)
    return file_hash.checksum(), other


def _read(file: FileIO, block: memoryview, stop: int | None, *hashes: Hash) -> None:
    """Read a file up to a byte, or to its end, in blocks."""
    while count := file.readinto(block if stop is None else block[: max(0, stop - file.tell())]):
        for running in hashes:
            running.update(block[:count])


def _stored(directory: Path, manifest: Manifest, role: str) -> dict[str, list[StoredChunk]]:
    """List the contents of a role's files, in the order of each file."""
    by_file: dict[str, list[StoredChunk]] = {}
    for stored in read_metadata(directory, manifest, role).stored:
        by_file.setdefault(f"{role}/{stored.file}", []).append(stored)
    return {path: sorted(chunks, key=lambda chunk: chunk.start) for path, chunks in by_file.items()}


def _lost(path: Path, stored: Sequence[StoredChunk], entry: FileEntry) -> tuple[str, ...]:
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    return _keys([chunk for chunk in stored if chunk.stop > size] if size < entry.size else stored)


def _keys(stored: Sequence[StoredChunk]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chunk.key for chunk in stored))
