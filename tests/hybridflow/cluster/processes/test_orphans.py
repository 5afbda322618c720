"""Removal of earlier runs' files in directories that every user of the host can write to."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from engine3d import run_files
from hybridflow.cluster.processes.orphans import ray_directory, remove_orphans

RUN = "engine3d-rollout-abcdefgh"
RAY = "hf-ray-abcdefgh"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary directory; shared memory is another, beside it."""
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("hybridflow.cluster.processes.orphans.parent", lambda: tmp_path / "tmp")
    monkeypatch.setattr(run_files, "_SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "tmp"


def orphan(temporary: Path, name: str = RUN) -> Path:
    """Files of a run that was killed with its owner."""
    directory = temporary / name
    directory.mkdir()
    (directory / "owner").touch()
    return directory


def segments(temporary: Path, *names: str) -> list[Path]:
    paths = [temporary.parent / "shm" / name for name in names]
    for path in paths:
        path.touch()
    return paths


def test_what_a_killed_run_left_is_removed(temporary: Path) -> None:
    orphan(temporary)
    (orphan(temporary, RAY) / "log").touch()
    for name in (RUN, RAY):
        unfinished = temporary / f"new-{name}"
        unfinished.mkdir()
        os.utime(unfinished, (0, time.time() - 61))
    left = segments(temporary, f"scheduler-{RUN}", f"scheduler-{RUN}.lock")
    remove_orphans()
    assert not list(temporary.iterdir())
    assert not any(path.exists() for path in left)


def test_segments_of_runs_whose_names_go_on_are_left_alone(temporary: Path) -> None:
    live = segments(temporary, f"scheduler-{RUN}x", f"scheduler-{RUN[:-1]}i", "scheduler-engine3d-rollout-zzzzzzzz")
    orphan(temporary)
    for short in ("engine3d-rollout-", "engine3d-rollout-z", "engine3d-rollout-?zzzzzzz", "engine3d-rollout-[a-z]zzz"):
        orphan(temporary, short)
    remove_orphans()
    assert all(path.exists() for path in live)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to(victim: Path) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        path.symlink_to(victim)

    return spoil


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lock_that_is_no_file_is_neither_waited_for_nor_followed(temporary: Path, kind: str) -> None:
    victim = temporary.parent / "victim"
    victim.touch()
    spoil = fifo if kind == "fifo" else link_to(victim)
    directories = [orphan(temporary), orphan(temporary, RAY)]
    for directory in directories:
        spoil(directory / "owner")
    remove_orphans()
    assert all(directory.exists() for directory in directories)


def test_links_named_like_ours_lead_nowhere(temporary: Path) -> None:
    elsewhere = temporary.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").touch()
    os.utime(elsewhere, (0, 0))
    (temporary / RUN).symlink_to(elsewhere)
    (temporary / f"new-{RUN}").symlink_to(elsewhere)
    (temporary / RAY).symlink_to(elsewhere)
    kept = segments(temporary, f"scheduler-{RUN}")
    remove_orphans()
    assert (elsewhere / "owner").exists() and kept[0].exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_another_users_files_are_left_alone(temporary: Path) -> None:
    theirs = [orphan(temporary), orphan(temporary, RAY)]
    mine = orphan(temporary, "engine3d-rollout-mmmmmmmm")
    segment, foreign = segments(temporary, f"a-{mine.name}", f"b-{mine.name}")
    for path in (*theirs, foreign):
        os.chown(path, 65534, 65534)
    remove_orphans()
    assert all(path.exists() for path in (*theirs, foreign))
    assert not mine.exists() and not segment.exists()


@pytest.mark.parametrize("make", [run_files.make_run_directory, ray_directory])
def test_what_has_an_owner_stays(temporary: Path, make: Callable[[], tuple[Path, IO[bytes]]]) -> None:
    directory, lock = make()
    assert directory.parent == temporary and directory.stat().st_mode & 0o777 == 0o700
    remove_orphans()
    assert directory.exists()
    lock.close()
    remove_orphans()
    assert not directory.exists()
