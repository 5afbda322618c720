"""Run directories that only their user may read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.rundir.private import MASK, keep_private, take_umask, umask_environment
from hybridflow.rundir.status.lock import claim


@pytest.fixture
def public() -> Iterator[None]:
    """The umask of most systems, in place of the one of before once the test has ended."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write(directory: Path) -> list[int]:
    """Modes of a directory that another process makes in one, and of its file."""
    code = "import pathlib, sys; d = pathlib.Path(sys.argv[1]); d.mkdir(parents=True); (d / 'file').write_text('text')"
    subprocess.run([sys.executable, "-c", code, str(directory / "inner")], check=True)
    return [mode(directory / "inner"), mode(directory / "inner" / "file")]


@pytest.mark.usefixtures("public")
def test_a_private_run_is_its_users_alone(tmp_path: Path) -> None:
    with claim(tmp_path / "runs" / "new", private=True):
        assert mode(tmp_path / "runs" / "new") == 0o700
        assert write(tmp_path / "runs" / "new") == [0o700, 0o600]


@pytest.mark.usefixtures("public")
def test_the_directory_of_a_run_that_was_public_becomes_private(tmp_path: Path) -> None:
    claim(tmp_path / "run").close()
    assert mode(tmp_path / "run") == 0o755 and write(tmp_path / "run") == [0o755, 0o644]
    claim(tmp_path / "run", in_place=True, private=True).close()
    assert mode(tmp_path / "run") == 0o700


@pytest.mark.usefixtures("public")
def test_ranks_get_the_umask_of_the_driver() -> None:
    for mask in (0o022, MASK):
        os.umask(mask)
        variables = {"OTHER": "1", **umask_environment()}
        os.umask(0)  # of the rank
        take_umask(variables)
        assert os.umask(0o022) == mask and variables == {"OTHER": "1"}
    keep_private()
    assert os.umask(0o022) == MASK
