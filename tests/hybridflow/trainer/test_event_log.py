"""The events of steps on their way to the disk: cut where a run resumes, and lost alone where the disk is full."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.trainer.event_log import EventLog

EVENTS = [{"event": "drawn", "prompts": [3, 1]}, {"event": "trained", "samples": [0, 1]}]


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_what_it_decides_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, None) as events:
        for step in (0, 1, 2, 10, 11):
            events.write(step, EVENTS)
    assert json.loads(path.read_text().splitlines()[0]) == {"step": 0, **EVENTS[0]}
    with path.open("a") as file:
        file.write('{"step": 12, "event": "le')  # killed
    with EventLog(path, 10) as events:
        assert steps(path) == [0, 0, 1, 1, 2, 2, 10, 10]
        events.write(11, EVENTS[:1])
    assert steps(path) == [0, 0, 1, 1, 2, 2, 10, 10, 11]


def test_a_half_line_of_the_last_step_that_is_kept_goes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1, "event": "a"}\n{"step": 2, "event": "b"')
    with EventLog(path, 5):
        assert steps(path) == [1]


def test_turned_off_nothing_is_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", None, enabled=False) as events:
        events.write(1, EVENTS)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow beyond so many bytes: as on a full disk, writing fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
    yield 400
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_cannot_be_written_costs_the_step_s_events_and_one_line(
    small_files: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, None) as events:
        events.write(1, EVENTS)
        for step in (2, 3):
            events.write(step, [{"event": "trained", "samples": list(range(1000))}])
        assert steps(path) == [1, 1]
        events.write(4, EVENTS)
    assert steps(path) == [1, 1, 4, 4]
    printed = capsys.readouterr()
    assert printed.err == f"hybridflow: events: {path} lacks those of step 2 on: File too large; training continues\n"
    assert printed.out == "events: written again from step 4 on; those of steps 2 to 3 are missing\n"


def test_a_place_that_is_no_file_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.mkdir()
    with EventLog(path, None) as events:
        events.write(1, EVENTS)
    assert capsys.readouterr().err == (
        f"hybridflow: events: {path} cannot be written: {os.strerror(21)}; the run continues without it\n"
    )
