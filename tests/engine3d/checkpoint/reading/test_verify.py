"""Damaged files are named, with the tensors that are lost. Metadata is read without trusting it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from engine3d.checkpoint.manifest import MANIFEST, RoleSummary, read_manifest, write_manifest
from engine3d.checkpoint.metadata import METADATA, Chunk, ChunkedTensor, StoredChunk, read_metadata
from engine3d.checkpoint.reading.inspect import inspect_checkpoint
from engine3d.checkpoint.reading.verify import Damage, verify_checkpoint
from engine3d.errors import UserError
from tests.support.small_checkpoints import describe, make_checkpoint_of_tensors

CHANGED = "is damaged: its checksum is not that of the manifest"


def chunks_by_file(directory: Path, role: str = "actor") -> dict[str, list[tuple[int, int, str]]]:
    """(start, stop, key) of everything that lies in each file of a role, as torch says it."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in FileSystemReader(directory / role).read_metadata().storage_data.items():
        chunk = (info.offset, info.offset + info.length, index.fqn)
        by_file.setdefault(f"{role}/{info.relative_path}", []).append(chunk)
    return {file: sorted(chunks) for file, chunks in by_file.items()}


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_a_whole_checkpoint_has_no_damage(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    assert verify_checkpoint(directory) == []
    assert verify_checkpoint(directory, threads=1) == []


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    for entry in read_manifest(directory).files:
        for position in {0, entry.size // 2, entry.size - 1}:
            flip(directory / entry.path, position)
            (damage,) = verify_checkpoint(directory)
            assert (damage.file, damage.reason) == (entry.path, CHANGED)
            flip(directory / entry.path, position)
    assert verify_checkpoint(directory) == []


def test_the_tensors_of_a_damaged_file_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    ((file, chunks),) = chunks_by_file(directory, "critic").items()
    assert len(chunks) == 6
    flip(directory / file, 1000)
    keys = tuple(key for _, _, key in chunks)
    assert verify_checkpoint(directory) == [Damage(file, CHANGED, keys)]
    size = (directory / file).stat().st_size
    with (directory / file).open("ab") as longer:
        longer.write(b"12345")
    reason = f"has {size + 5:,} bytes, expected {size:,}"
    assert verify_checkpoint(directory) == [Damage(file, reason, keys)]
    (directory / file).unlink()
    assert verify_checkpoint(directory) == [Damage(file, "is missing", keys)]


def test_of_a_file_that_was_cut_off_those_past_its_end_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    ((file, chunks),) = chunks_by_file(directory).items()
    full_size = (directory / file).stat().st_size
    assert chunks[-1][1] == full_size
    for number in (5, 3, 0):
        start, stop, _ = chunks[number]
        for size in (stop - 1, start):
            os.truncate(directory / file, size)
            reason = f"has {size:,} bytes, expected {full_size:,}"
            assert verify_checkpoint(directory) == [Damage(file, reason, tuple(key for _, _, key in chunks[number:]))]


def test_tensors_are_named_in_the_order_of_the_file_whatever_the_order_of_the_metadata(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    ((file, chunks),) = chunks_by_file(directory).items()
    metadata = FileSystemReader(directory / "actor").read_metadata()
    metadata.storage_data = dict(reversed(metadata.storage_data.items()))
    (directory / "actor" / METADATA).write_bytes(pickle.dumps(metadata))
    write_manifest(directory, describe(directory))
    flip(directory / file, 0)
    assert verify_checkpoint(directory) == [Damage(file, CHANGED, tuple(key for _, _, key in chunks))]


def test_damages_are_told_in_the_manifests_order_however_long_each_file_takes(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    paths = [entry.path for entry in read_manifest(directory).files]
    for path in paths:
        flip(directory / path, 0)
    assert [damage.file for damage in verify_checkpoint(directory)] == paths


@pytest.mark.parametrize("way", ["../0.distcp", "/etc/hostname"])
def test_metadata_that_names_files_elsewhere_is_refused(tmp_path: Path, way: str) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    metadata = FileSystemReader(directory / "actor").read_metadata()
    first = next(iter(metadata.storage_data))
    metadata.storage_data[first] = replace(metadata.storage_data[first], relative_path=way)
    (directory / "actor" / METADATA).write_bytes(pickle.dumps(metadata))
    write_manifest(directory, describe(directory))
    with pytest.raises(UserError, match=rf"actor/\.metadata names the file '{way}', expected one of its own directory"):
        read_metadata(directory, read_manifest(directory), "actor")


class _Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_metadata_file_that_was_changed_is_reported_and_not_unpickled(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    ((file, _),) = chunks_by_file(directory).items()
    trap = tmp_path / "sprung"
    (directory / "actor" / METADATA).write_bytes(pickle.dumps(_Trap(trap)))
    flip(directory / file, 0)
    damages = {damage.file: damage for damage in verify_checkpoint(directory)}
    assert damages.keys() == {file, f"actor/{METADATA}"}
    assert damages[file] == Damage(file, CHANGED, ())
    size = read_manifest(directory).files[0].size
    assert damages[f"actor/{METADATA}"].reason.endswith(f"bytes, expected {size:,}")
    assert f"actor/{METADATA} is damaged: its checksum is not that of the manifest" in inspect_checkpoint(directory)
    with pytest.raises(UserError, match="is damaged"):
        read_metadata(directory, read_manifest(directory), "actor")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("name", "code"),
    [("posix.mkdir", "cposix\nmkdir\n(V{}\ntR."), ("torch.save", "ctorch\nsave\n(I1\nV{}\ntR.")],
)
def test_a_metadata_file_that_runs_code_is_refused_although_its_checksum_is_right(
    tmp_path: Path, name: str, code: str
) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    trap = tmp_path / "sprung"
    data = code.format(trap).encode()
    (directory / "actor" / METADATA).write_bytes(data)
    write_manifest(directory, describe(directory))
    reason = f"cannot be read: it names {name}, which describes no tensor"
    assert verify_checkpoint(directory) == [Damage(f"actor/{METADATA}", reason, ())]
    assert reason in inspect_checkpoint(directory)
    assert not trap.exists()
    pickle.loads(data)
    assert trap.exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(1)[:-1]])
def test_a_metadata_file_that_describes_nothing(tmp_path: Path, data: bytes) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    (directory / "actor" / METADATA).write_bytes(data)
    write_manifest(directory, describe(directory))
    (damage,) = verify_checkpoint(directory)
    assert damage.file == f"actor/{METADATA}"
    assert damage.reason.startswith(("cannot be read: ", "does not describe tensors"))


def test_metadata_is_what_torch_reads(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    metadata = read_metadata(directory, read_manifest(directory), "actor")
    expected = FileSystemReader(directory / "actor").read_metadata()
    tensors = {
        key: ChunkedTensor(
            tuple(entry.size),
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
        )
        for key, entry in expected.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert metadata.tensors == tensors
    assert len(tensors) == 5
    assert metadata.stored == tuple(
        StoredChunk(index.fqn, tuple(index.offset or ()), info.relative_path, info.offset, info.length)
        for index, info in expected.storage_data.items()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {1: BytesStorageMetadata(), 2: MetadataIndex("a")}},
        {"storage_data": {"weight/a": None}},
        {"storage_data": {MetadataIndex("a"): _StorageInfo("__0_0.distcp", "0", 1)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex("a", (0,)): _StorageInfo("__0_0.distcp", 0, True)}},
    ],
)
def test_metadata_of_other_types_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    metadata = FileSystemReader(directory / "actor").read_metadata()
    (directory / "actor" / METADATA).write_bytes(pickle.dumps(replace(metadata, **changes)))
    write_manifest(directory, describe(directory))
    assert verify_checkpoint(directory) == [Damage(f"actor/{METADATA}", "does not describe tensors", ())]


def test_a_manifest_that_forgets_files_of_a_role(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    ((file, chunks),) = chunks_by_file(directory).items()
    manifest = read_manifest(directory)
    for path, keys in ((file, tuple(key for _, _, key in chunks)), (f"actor/{METADATA}", ())):
        left = tuple(entry for entry in manifest.files if entry.path != path)
        write_manifest(directory, replace(manifest, files=left))
        assert verify_checkpoint(directory) == [Damage(path, "is not listed in the manifest", keys)]


def test_a_checkpoint_that_vanishes(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    shutil.rmtree(directory / "actor")
    assert [(damage.file, damage.reason) for damage in verify_checkpoint(directory)] == [
        (entry.path, "is missing") for entry in read_manifest(directory).files if entry.path.startswith("actor/")
    ]
    (directory / MANIFEST).unlink()
    for look in (verify_checkpoint, inspect_checkpoint):
        with pytest.raises(UserError, match=rf"^checkpoint {directory}: it has no {MANIFEST}"):
            look(directory)


def test_what_inspect_tells(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    sizes = {entry.path: entry.size for entry in read_manifest(directory).files}
    lines = inspect_checkpoint(directory).splitlines()
    assert lines[:4] == [
        f"checkpoint {directory}",
        "step 12, saved 2026-01-02T03:04:05+00:00",
        "driver: step 12, policy version 13, prompts count 64, position 32, kl controller coefficient 0.25",
        "actor: 1,000 parameters, optimizer step 12; trained in bfloat16 on 4 ranks, tp=2 dp=2",
    ]
    assert lines[4:6] == ["  weight 4 tensors, 32.77 kB of float32", "  exp_avg 1 tensors, 8.19 kB of float32"]
    actor = sum(size for path, size in sizes.items() if path.startswith("actor/"))
    assert f"  actor/: 2, {actor / 1e3:.2f} kB" in lines
    assert f"files: 5, {sum(sizes.values()) / 1e3:.2f} kB" in lines
    assert lines[-1] == "software: torch 1.2.3"
    (directory / "driver.json").write_text('{"step": 12, "groups": {"ledger": {"groups": [{}, {}], "returned": []}}}')
    assert inspect_checkpoint(directory).splitlines()[2] == "driver: step 12, buffered groups 2"
    (directory / "actor" / "__0_0.distcp").unlink()
    (directory / "driver.json").write_text("{")
    lines = inspect_checkpoint(directory).splitlines()
    assert lines[2].startswith(
        "driver: driver.json cannot be read: not valid JSON: no name in double quotes at column 2"
    )
    assert lines[-2] == "incomplete: actor/__0_0.distcp is missing"
    assert lines[-1].startswith("incomplete: driver.json has 1 bytes, expected ")


def test_facts_are_told_as_they_are(tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    (directory / "driver.json").unlink()
    imported = RoleSummary("imported", 1, "bfloat16", True, 2_000_000, None)
    write_manifest(directory, describe(directory, roles={"actor": imported}))
    line = "actor: 2,000,000 parameters, value head, weights alone; trained in bfloat16 on 1 rank, imported"
    assert inspect_checkpoint(directory).splitlines()[2] == line
