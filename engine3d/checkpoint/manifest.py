"""Checkpoint manifest: files, sizes, checksums. It is written last, as the commit marker."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Buffer, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import xxhash
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from engine3d.durable import bring_to_disk, naming
from engine3d.errors import EngineError, UserError
from engine3d.input_files import MOST_LIST_BYTES, FileError, JsonError, parse_json, read_bytes
from engine3d.json_records import first_error

FORMAT = 5
"""Format of manifests and of what they describe. Readers refuse a higher one. Format 1 has no state of the algorithm.
Before format 3 the manifest has no checksum of its own, the chunks of tensors have none, and evaluations do not say
what they measured. Before format 4 buffered samples are padded rows. Before format 5 they are kept in two ways: as one
batch that was generated ahead, or as the groups of a stream.
"""

MANIFEST = "manifest.json"


def verify_hint(checkpoint: Path | None = None) -> str:
    """Closing hint of a line about a damaged checkpoint, or about several."""
    command = "hybridflow checkpoint verify" + (f" {checkpoint}" if checkpoint is not None else "")
    return f"`{command}` says what is damaged"


_SEAL = "checksum"
_FIRST_SEALED = 3
_BLOCK = 4 << 20
_STEP = re.compile(r"step-(\d{8,})")
_MOST_STEPS = 10**12
"""More than any run has. Larger numbers are damage, and as names of directories they would come last."""
_STRICT = ConfigDict(extra="forbid", strict=True)


def _inside(path: str) -> str:
    """A path that leads to a file of the checkpoint, and is written in one way only."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\0" in path or path == MANIFEST:
        raise ValueError("expected the path of a file in the checkpoint")
    return path


class Hash:
    """Running checksum of bytes that are given in blocks."""

    ALGORITHM: ClassVar = "xxh3_128"

    def __init__(self, data: Buffer = b"") -> None:
        self._state = xxhash.xxh3_128(data)

    def update(self, data: Buffer) -> None:
        """Add bytes; other threads run meanwhile."""
        self._state.update(data)

    def checksum(self) -> str:
        """Checksum of all that was given, as a manifest stores it."""
        return f"{self.ALGORITHM}:{self._state.hexdigest()}"


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: relative to the checkpoint, with forward slashes.
        size: bytes.
        checksum: of all bytes: the name of the algorithm, a colon, hexadecimal digits.
    """

    __pydantic_config__ = _STRICT

    path: Annotated[str, AfterValidator(_inside)]
    size: Annotated[int, Field(ge=0)]
    checksum: Annotated[str, Field(pattern=rf"^{Hash.ALGORITHM}:[0-9a-f]{{32}}$")]


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters that a checkpoint holds in place of a model's weights.

    Args:
        rank, alpha: of `LoraConfig`.
        targets: names of the linear layers with adapters.
        base: `TensorFiles.fingerprint` of the model that they belong to.
    """

    __pydantic_config__ = _STRICT

    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)]
    targets: tuple[str, ...]
    base: str


@dataclass(frozen=True)
class RoleSummary:
    """State of one role in a checkpoint.

    Args:
        layout: that it was trained with; what is stored does not depend on it.
        world_size: ranks of that layout.
        dtype: of the model in training.
        value_head: the model ends in one value a token, and not in logits.
        parameters: elements of the complete model, or of its adapters.
        optimizer_step: None if there is no state of an optimizer.
        adapters: None where the weights of the model are stored.
        mtp: True if the layer for multi-token prediction is stored with them.
    """

    __pydantic_config__ = _STRICT

    layout: str
    world_size: Annotated[int, Field(ge=1)]
    dtype: str
    value_head: bool
    parameters: Annotated[int, Field(ge=0)]
    optimizer_step: Annotated[int, Field(ge=0)] | None
    adapters: StoredAdapters | None = None
    mtp: bool = False


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: step, roles, recipe, software, and every file.

    Args:
        step: training steps that were done.
        created: time in ISO 8601.
        roles: by name; the state of each lies in a folder of that name.
        recipe: the settings of the run, as JSON holds them.
        software: versions of what made it.
        files: all but the manifest itself.
        format: of this file.
    """

    __pydantic_config__ = _STRICT

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    created: str
    roles: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], RoleSummary]
    recipe: dict[str, Any]
    software: dict[str, str]
    files: tuple[FileEntry, ...]
    format: Annotated[int, Field(ge=1)] = FORMAT


@dataclass(frozen=True)
class Skipped:
    """A directory that is no complete checkpoint, and the reason."""

    directory: Path
    reason: str
    newer: bool = False
    """True if it may be a checkpoint of a newer version."""


class _Incomplete(Exception):
    """Reason for which a directory is no complete checkpoint, in words that continue after its name."""


class _Newer(_Incomplete):
    pass


def is_step_directory(directory: Path) -> bool:
    """True if a directory is named as the checkpoint of a step."""
    return _STEP.fullmatch(directory.name) is not None


def step_directory(root: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return root / f"step-{step:08d}"


def checksum(path: Path) -> str:
    """Checksum of a file of any size, read in blocks. Other threads run meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    with naming(path), path.open("rb", buffering=0) as file:
        return _checksum(file.fileno())


def file_entry(root: Path, path: Path) -> FileEntry:
    """A file as a manifest lists it; its bytes are on the disk when this returns.

    Args:
        root: the checkpoint's directory.
        path: the file, somewhere in it.
    """
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return FileEntry(path.relative_to(root).as_posix(), size, _checksum(file.fileno()))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make a checkpoint exist, also after a loss of power. Its files are written, and each is on the disk by itself.

    Raises:
        EngineError: a file that the manifest lists is not there.
        OSError: the disk is full, or the directory has vanished or cannot be written to.
    """
    try:
        _check_files(directory, manifest)
    except _Incomplete as error:
        raise EngineError(f"checkpoint {directory}: {error}; do all nodes see the same directory?") from None
    scratch = directory / f".{MANIFEST}.new"
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    with naming(scratch), scratch.open("wb") as file:
        file.write(sealed(text) if manifest.format >= _FIRST_SEALED else text.encode())
        file.flush()
        os.fsync(file.fileno())
    # A file is only found again if the folders that lead to it are on the disk; the manifest's name comes after them.
    folders = {folder for entry in manifest.files for folder in (directory / entry.path).parents}
    within = {folder for folder in folders if folder.is_relative_to(directory)}
    for folder in sorted({*within, directory, directory.parent}):
        bring_to_disk(folder)
    scratch.replace(directory / MANIFEST)
    bring_to_disk(directory)


def sealed(text: str) -> bytes:
    """A manifest as it is stored: a JSON object, whose first line is the checksum of all that follows it."""
    rest = f"{text.removeprefix('{')}\n".encode()
    return f'{{"{_SEAL}": "{Hash(rest).checksum()}",'.encode() + rest


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Its files are not looked at.

    Raises:
        UserError: there is no checkpoint, it was never finished, or its manifest cannot be read.
    """
    try:
        return _read(directory)
    except _Incomplete as error:
        raise UserError(f"checkpoint {directory}: {error}") from None


def read_complete(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that every file is there with its size.

    Raises:
        UserError: as `read_manifest`, or a file is missing or cut off.
    """
    try:
        manifest = _read(directory)
        _check_files(directory, manifest)
    except _Incomplete as error:
        raise UserError(f"checkpoint {directory}: {error}") from None
    return manifest


def find_checkpoints(root: Path) -> tuple[list[Path], list[Skipped]]:
    """The checkpoints in a directory, which need not exist.

    Returns:
        Those that are complete, the newest (of the highest step) first: their manifest can be read, and every file is
        there with its size. And whatever else is named like one.

    Raises:
        UserError: the directory cannot be read.
    """
    complete: list[tuple[int, Path]] = []
    skipped = []
    for directory in _named_like_one(root):
        try:
            manifest = _read(directory)
            if directory != step_directory(root, manifest.step):
                raise _Incomplete(f"{MANIFEST} is that of step {manifest.step}")
            _check_files(directory, manifest)
        except _Incomplete as error:
            skipped.append(Skipped(directory, str(error), newer=isinstance(error, _Newer)))
        else:
            complete.append((manifest.step, directory))
    return [directory for _, directory in sorted(complete, reverse=True)], skipped


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, complete or not. Of a link to one, remove the link. At no time does half a checkpoint look
    complete.

    Raises:
        OSError: something in it cannot be removed.
    """
    if directory.is_symlink():
        directory.unlink()
        return
    try:
        (directory / MANIFEST).unlink()
        bring_to_disk(directory)  # or a loss of power could bring the manifest back, and not the files
    except FileNotFoundError:
        pass  # a partial one, or somebody else removes it too
    shutil.rmtree(directory, onexc=_unless_gone)


def prune(root: Path, keep_last: int, keep_steps: Collection[int] = ()) -> list[Path]:
    """Remove the oldest of the complete checkpoints until `keep_last` are left, and those of `keep_steps`.

    Returns:
        What was removed.

    Raises:
        OSError: something cannot be removed.
        UserError: the directory cannot be read.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}, expected at least 1")
    complete, _ = find_checkpoints(root)
    kept = {step_directory(root, step) for step in keep_steps}
    removed = [directory for directory in complete[keep_last:][::-1] if directory not in kept]
    for directory in removed:
        remove_checkpoint(directory)
    return removed


def remove_partial(root: Path) -> list[Skipped]:
    """Remove the checkpoints without a manifest: what killed saves leave. No save may be in flight.

    Returns:
        What was removed.

    Raises:
        OSError: something cannot be removed.
        UserError: the directory cannot be read.
    """
    removed = []
    for directory in _named_like_one(root):
        if _is_partial(directory):
            remove_checkpoint(directory)
            removed.append(Skipped(directory, f"it has no {MANIFEST}: its save was not finished"))
    return removed


def _is_partial(directory: Path) -> bool:
    if directory.is_symlink():
        return False  # made by hand, and no save writes through one
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            return False
        (directory / MANIFEST).lstat()
    except FileNotFoundError:
        return directory.exists()
    except PermissionError:
        pass  # nobody knows what is in it
    return False


def _named_like_one(root: Path) -> Iterator[Path]:
    """Whatever in a directory is named like a checkpoint, in the order of the names."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"checkpoints: {root} cannot be read: {error.strerror}") from None
    yield from (root / name for name in names if _STEP.fullmatch(name))


def _read(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        text = read_bytes(path, MOST_LIST_BYTES)
    except FileError as error:
        if error.errno == errno.ENOENT and not directory.exists():
            raise _Incomplete("there is no such directory") from None
        if error.errno == errno.ENOENT:
            raise _Incomplete(f"it has no {MANIFEST}: it is no checkpoint, or its save was not finished") from None
        if error.errno == errno.ENOTDIR:
            raise _Incomplete("it is a file, expected the directory of a checkpoint") from None
        raise _Incomplete(f"{MANIFEST} {error.reason}") from None
    try:
        parsed = parse_json(text)
    except JsonError as error:
        raise _Incomplete(f"{MANIFEST} is damaged: {error}") from None
    if not isinstance(parsed, dict) or type(parsed.get("format")) is not int:
        raise _Incomplete(f"{MANIFEST} is not the manifest of a checkpoint: it has no format")
    if parsed["format"] > FORMAT:
        raise _Newer(f"{MANIFEST} has format {parsed['format']}, this version reads {FORMAT}: a newer one made it")
    if parsed["format"] >= _FIRST_SEALED:
        seal, newline, rest = text.partition(b"\n")
        if seal != f'{{"{_SEAL}": "{Hash(newline + rest).checksum()}",'.encode():
            raise _Incomplete(f"{MANIFEST} is damaged: its checksum is not that of its text")
        text = b"{" + rest
    try:
        manifest = _MANIFESTS.validate_json(text)
    except ValidationError as error:
        raise _Incomplete(f"{MANIFEST} is damaged: {first_error(error)}") from None
    if not manifest.files:
        raise _Incomplete(f"{MANIFEST} is damaged: it lists no file")
    paths = [entry.path for entry in manifest.files]
    if len(set(paths)) < len(paths):
        raise _Incomplete(f"{MANIFEST} is damaged: it lists a file twice")
    return manifest


def _check_files(directory: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        if reason := visible_damage(directory, entry):
            raise _Incomplete(f"{entry.path} {reason}")


def visible_damage(directory: Path, entry: FileEntry) -> str | None:
    """Why a file of a checkpoint cannot be what was saved, as far as can be seen without reading it."""
    try:
        status = (directory / entry.path).stat()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_size != entry.size:
        return f"has {status.st_size:,} bytes, expected {entry.size:,}"
    return None


def _checksum(descriptor: int) -> str:
    computed = Hash()
    block = memoryview(bytearray(_BLOCK))
    while read := os.readv(descriptor, [block]):
        computed.update(block[:read])
    return computed.checksum()


def _unless_gone(_function: object, _path: str, error: BaseException) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


_MANIFESTS = TypeAdapter(Manifest)
