"""The files of a sample store: whole or not there, and within their bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.rundir.samples.files import (
    forget_later_steps,
    forget_oldest_steps,
    replacing,
    sample_file,
    stored_steps,
)


def a_step(store: Path, step: int, size: int = 100) -> Path:
    with replacing(sample_file(store, step)) as file:
        file.write(b"x" * size)
    return sample_file(store, step)


def test_a_file_that_is_not_finished_is_none(tmp_path: Path) -> None:
    a_step(tmp_path, 3)
    with pytest.raises(KeyboardInterrupt), replacing(sample_file(tmp_path, 3)) as file:
        file.write(b"half")
        assert stored_steps(tmp_path) == {3: sample_file(tmp_path, 3)}
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003.parquet"]
    assert sample_file(tmp_path, 3).read_bytes() == b"x" * 100


def test_steps_are_those_of_whole_files_the_oldest_first(tmp_path: Path) -> None:
    for step in (10, 9, 123_456_789, 1):
        a_step(tmp_path, step)
    for name in (".step-00000011.parquet.new", "step-2.parquet", "step-00000004.parquet.bak", "notes"):
        (tmp_path / name).write_text("")
    assert list(stored_steps(tmp_path)) == [1, 9, 10, 123_456_789]
    assert stored_steps(tmp_path / "nowhere") == {}


def test_a_resumed_run_has_nothing_of_what_it_makes_again(tmp_path: Path) -> None:
    for step in range(1, 6):
        a_step(tmp_path, step)
    (tmp_path / ".step-00000006.parquet.new").write_text("half")
    (tmp_path / "notes").write_text("the user's")
    forget_later_steps(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        *(f"step-0000000{step}.parquet" for step in (1, 2, 3)),
    ]
    forget_later_steps(tmp_path / "nowhere", 3)


def test_the_oldest_steps_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        a_step(tmp_path, step)
    forget_oldest_steps(tmp_path, 400)
    assert list(stored_steps(tmp_path)) == [8, 9, 10, 11]
    forget_oldest_steps(tmp_path, 399)
    assert list(stored_steps(tmp_path)) == [9, 10, 11]
    forget_oldest_steps(tmp_path, 250)
    assert list(stored_steps(tmp_path)) == [10, 11]
    forget_oldest_steps(tmp_path, 1)
    assert list(stored_steps(tmp_path)) == [11]
