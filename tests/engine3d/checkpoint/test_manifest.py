"""Conditions under which a checkpoint exists."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine3d.checkpoint import manifest as module
from engine3d.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    checksum,
    file_entry,
    find_checkpoints,
    prune,
    read_complete,
    read_manifest,
    remove_checkpoint,
    remove_partial,
    step_directory,
    write_manifest,
)
from engine3d.errors import EngineError, UserError
from tests.support.small_checkpoints import FACTS, describe, make_checkpoint

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((directory / MANIFEST).read_text())
    change(content)
    content.pop("checksum")
    (directory / MANIFEST).write_bytes(module.sealed(json.dumps(content, indent=1)))


def reason(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_manifest(directory)
    assert str(caught.value).startswith(f"checkpoint {directory}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"checkpoint {directory}: ")


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    roles = {"actor": FACTS, "critic": replace(FACTS, value_head=True, optimizer_step=None)}
    recipe = {"train": {"lr": 1e-6, "betas": [0.9, None]}}
    written = describe(directory, roles=roles, recipe=recipe, software={"a": "1"})
    write_manifest(directory, written)
    assert read_manifest(directory) == read_complete(directory) == written
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


def test_a_checksum_is_that_of_all_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert checksum(path) == "xxh3_128:99aa06d3014798d86001c324468d497f"  # from xxHash's own tests
    data = bytearray(os.urandom(9_000_001))  # several blocks, the last of them not full
    path.write_bytes(data)
    before = file_entry(tmp_path, path)
    assert before.size == 9_000_001
    for position in (0, 4 << 20, len(data) - 1):
        data[position] ^= 1
        path.write_bytes(data)
        assert checksum(path) != before.checksum
        data[position] ^= 1
    path.write_bytes(data)
    assert checksum(path) == before.checksum


def test_everything_is_on_the_disk_before_the_manifest_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path)
    manifest = read_manifest(directory)
    (directory / MANIFEST).unlink()
    events = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    file_entry(directory, directory / "driver.json")
    assert events == [str(directory / "driver.json")]
    events.clear()
    write_manifest(directory, manifest)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {str(directory / f".{MANIFEST}.new"), str(directory), str(directory / "actor"), str(tmp_path)}
    assert after == [str(directory)]


def test_no_manifest_for_files_that_are_not_there(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    manifest = read_manifest(directory)
    (directory / MANIFEST).unlink()
    (directory / "actor" / "weights").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"actor/weights has 5 bytes, expected 7,000; do all nodes see"):
        write_manifest(directory, manifest)
    shutil.rmtree(directory / "actor")
    with pytest.raises(EngineError, match=r"actor/weights is missing; do all nodes see"):
        write_manifest(directory, manifest)
    assert not (directory / MANIFEST).exists()
    shutil.rmtree(directory)
    with pytest.raises(OSError, match="No such file"):
        write_manifest(directory, replace(manifest, files=()))


def first_file(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["files"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda content: content.update(format=FORMAT + 1, more="new"),
            f"has format {FORMAT + 1}, this version reads {FORMAT}",
        ),
        (lambda content: content.update(format=0), "damaged: format: "),
        (lambda content: content.pop("format"), "is not the manifest of a checkpoint"),
        (lambda content: content.update(format="1"), "is not the manifest of a checkpoint"),
        (lambda content: content.pop("files"), "damaged: it has no files"),
        (lambda content: content.update(more=1), "damaged: more is no field of it"),
        (lambda content: content.update(step="12"), "damaged: step: "),
        (lambda content: content.update(step=-1), "damaged: step: "),
        (lambda content: content["roles"]["actor"].update(world_size=1.5), "damaged: roles.actor.world_size: "),
        (lambda content: content["roles"].update({"../actor": content["roles"]["actor"]}), "damaged: roles.../actor."),
        (first_file(size=-1), "damaged: files.0.size: "),
        (first_file(checksum="sha256:" + 32 * "0"), "damaged: files.0.checksum: "),
        (first_file(path="../other/driver.json"), "damaged: files.0.path: "),
        (first_file(path="actor/../../x"), "damaged: files.0.path: "),
        (first_file(path="/etc/passwd"), "damaged: files.0.path: "),
        (first_file(path="./driver.json"), "damaged: files.0.path: "),
        (first_file(path=""), "damaged: files.0.path: "),
        (first_file(path="a\0b"), "damaged: files.0.path: "),
        (first_file(path=MANIFEST), "damaged: files.0.path: "),
        (lambda content: content["files"].append(content["files"][0]), "damaged: it lists a file twice"),
        (lambda content: content["files"].clear(), "damaged: it lists no file"),
    ],
)
def test_a_manifest_that_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], expected: str) -> None:
    directory = make_checkpoint(tmp_path)
    edit(directory, change)
    assert reason(directory).startswith(f"{MANIFEST} ")
    assert expected in reason(directory)


def test_any_change_of_a_manifests_text_is_seen(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    write_manifest(directory, describe(directory, recipe={"train": {"lr": 1e-6}}))
    complete = (directory / MANIFEST).read_bytes()
    for before, after in [
        (b"1e-06", b"9e-06"),
        (b'"step": 12', b'"step": 13'),
        (b'"step"', b' "step"'),
        (b"xxh3_128:", b"xxh3_128:0"),
    ]:
        assert before in complete
        (directory / MANIFEST).write_bytes(complete.replace(before, after, 1))
        assert reason(directory) == f"{MANIFEST} is damaged: its checksum is not that of its text"
    # Those of format 2 have none.
    content = {key: value for key, value in json.loads(complete).items() if key != "checksum"}
    (directory / MANIFEST).write_text(json.dumps(content | {"format": 2}))
    assert read_manifest(directory).recipe == {"train": {"lr": 1e-6}}


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_none(tmp_path: Path, text: bytes) -> None:
    directory = make_checkpoint(tmp_path)
    (directory / MANIFEST).write_bytes(text)
    assert reason(directory).startswith(f"{MANIFEST} is ")


def test_a_manifest_that_was_cut_off_is_refused_wherever(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    complete = (directory / MANIFEST).read_bytes()
    for length in range(0, len(complete.rstrip()), 7):
        (directory / MANIFEST).write_bytes(complete[:length])
        assert reason(directory).startswith(f"{MANIFEST} is ")
        assert find_checkpoints(tmp_path)[0] == []


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert reason(tmp_path / "nowhere") == "there is no such directory"
    assert reason(tmp_path) == f"it has no {MANIFEST}: it is no checkpoint, or its save was not finished"
    (tmp_path / "file").write_text("")
    assert reason(tmp_path / "file") == "it is a file, expected the directory of a checkpoint"


def test_found_are_the_whole_ones_newest_first_and_why_the_others_are_not(tmp_path: Path) -> None:
    for step in (9, 99_999_999, 123_456_789, 30, 31, 32, 33, 34):
        make_checkpoint(tmp_path, step)
    at = {step: step_directory(tmp_path, step) for step in range(200)}
    (at[30] / "driver.json").unlink()
    with (at[31] / "actor" / "weights").open("ab") as file:
        file.write(b"more")
    (at[32] / MANIFEST).unlink()
    (at[33] / "driver.json").unlink()
    os.mkfifo(at[33] / "driver.json")
    (at[34]).rename(at[40])
    at[41].write_text("a file")
    at[42].symlink_to("nowhere")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-00000043.old").mkdir()
    (tmp_path / "notes").mkdir()
    complete, skipped = find_checkpoints(tmp_path)
    assert [path.name for path in complete] == ["step-123456789", "step-99999999", "step-00000009"]
    assert {skip.directory: skip.reason for skip in skipped} == {
        at[30]: "driver.json is missing",
        at[31]: "actor/weights has 7,004 bytes, expected 7,000",
        at[32]: f"it has no {MANIFEST}: it is no checkpoint, or its save was not finished",
        at[33]: "driver.json is not a file",
        at[40]: f"{MANIFEST} is that of step 34",
        at[41]: "it is a file, expected the directory of a checkpoint",
        at[42]: "there is no such directory",
    }
    with pytest.raises(UserError, match=r"step-00000030: driver\.json is missing"):
        read_complete(at[30])
    assert read_manifest(at[30]).step == 30


def test_a_directory_of_checkpoints_that_is_none(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "nowhere") == ([], [])
    assert remove_partial(tmp_path / "nowhere") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^checkpoints: .*file cannot be read: Not a directory$"):
        find_checkpoints(tmp_path / "file")


@as_user
def test_what_cannot_be_read_is_skipped_and_not_removed(tmp_path: Path) -> None:
    locked, unreadable = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    (unreadable / MANIFEST).chmod(0)
    locked.chmod(0)
    try:
        complete, skipped = find_checkpoints(tmp_path)
        assert complete == []
        assert [skip.reason for skip in skipped] == 2 * [f"{MANIFEST} cannot be read: Permission denied"]
        assert remove_partial(tmp_path) == []
        assert locked.exists() and unreadable.exists()
    finally:
        locked.chmod(0o700)


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(directory)
    assert (directory / "actor" / "weights").exists()
    complete, skipped = find_checkpoints(tmp_path)
    assert (complete, [skip.directory for skip in skipped]) == ([], [directory])
    assert [skip.directory for skip in remove_partial(tmp_path)] == [directory]
    assert list(tmp_path.iterdir()) == []


def test_removing_what_is_gone_or_a_link_to_one(tmp_path: Path) -> None:
    remove_checkpoint(tmp_path / "nowhere")
    kept = make_checkpoint(tmp_path / "archive")
    link = step_directory(tmp_path, 12)
    link.symlink_to(kept, target_is_directory=True)
    assert find_checkpoints(tmp_path) == ([link], [])
    remove_checkpoint(link)
    assert not link.is_symlink()
    assert read_complete(kept).step == 12


def test_only_the_oldest_whole_ones_are_pruned(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[0] / "driver.json").unlink()
    (paths[3] / MANIFEST).unlink()
    other = tmp_path / "step-00000000-mine"
    other.mkdir()
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path, 1) == [paths[1]]
    assert sorted(tmp_path.iterdir()) == sorted([other, paths[0], paths[2], paths[3]])
    with pytest.raises(ValueError, match="keep_last=0"):
        prune(tmp_path, 0)


def test_partial_ones_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = [make_checkpoint(tmp_path, step) for step in (1, 2)]
    (kept[1] / MANIFEST).write_text("{")  # damaged, and yet somebody may want to look at it
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [tmp_path / "step-00000003", tmp_path / "step-12", tmp_path / "step-00000004.old", elsewhere]
    others[0].write_text("a file")
    others[1].mkdir()
    others[2].mkdir()
    link = step_directory(tmp_path, 5)
    link.symlink_to(elsewhere)
    partial = make_checkpoint(tmp_path, 6)
    (partial / MANIFEST).rename(partial / f".{MANIFEST}.new")  # killed just before the manifest got its name
    (removed,) = remove_partial(tmp_path)
    assert (removed.directory, removed.reason) == (partial, f"it has no {MANIFEST}: its save was not finished")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, *others, link])
