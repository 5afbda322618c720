"""Files of a run's directory that hold anything, or are none: one line that names the file, in words of JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.input_files import FileError, JsonError, parse_json
from engine3d.json_records import record_of
from hybridflow.checkpoint.resume import RUN_IDENTITY, run_identity
from hybridflow.cli.main import main
from hybridflow.metrics.sinks.files import begin_lines
from hybridflow.rundir.file_names import FAILURE, HOSTS, METRICS, PHASE, RECIPE, RUN_RECORD
from hybridflow.rundir.run_record import RunStart, read_run_record
from hybridflow.rundir.samples.evaluation_texts import EvaluationText
from hybridflow.rundir.status.first_failure import FirstFailure, read_failure
from hybridflow.rundir.status.heartbeat import Heartbeat, read_heartbeat
from hybridflow.rundir.status.hosts_file import RunHost, read_hosts
from hybridflow.rundir.status.lock import LOCK, hold
from hybridflow.rundir.status.watching import RunPosition, read_position

READERS: dict[str, Callable[[Path], object]] = {
    PHASE: read_position,
    RUN_RECORD: read_run_record,
    FAILURE: read_failure,
    HOSTS: read_hosts,
    RUN_IDENTITY: run_identity,
}
LIBRARY_WORDS = re.compile(
    r"Errno|NoneType|object has no attribute|\w+Error\b|codec|Expecting|\bdict\b|\bstr\b|\bint\b|[\x00-\x1f]"
)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


CONTENTS: list[bytes | Callable[[Path], None]] = [
    b"5",
    b"null",
    b'"abc"',
    b"",
    b'{"a": [1,',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"step": 1' + b"0" * 5000 + b"}",
    b'{"step": 1e999, "phase": [], "since": 1e300, "starts": [{"at": {}}], "cause": 5}',
    b'{"\x1b[2J": "\x1b]0;x\x07"}',
    b'{"step": 1, "phase": "\\ud800", "since": 1}',
    pipe,
    device,
    directory,
    loop,
    large,
]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", CONTENTS, ids=lambda value: getattr(value, "__name__", repr(value)[:20]))
def test_anything_else_is_one_line_that_names_the_file(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], None]
) -> None:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    if name == RUN_IDENTITY and isinstance(content, bytes) and content != b"\xff\xfe" and len(content) < 4096:
        assert read_of(name, tmp_path) == content.decode().strip()  # any text is one
        return
    with pytest.raises(UserError) as error:
        read_of(name, tmp_path)
    line = str(error.value)
    assert line.startswith(f"{path}: ") and len(line) < len(str(path)) + 150
    assert not LIBRARY_WORDS.search(line.removeprefix(str(path)))


def read_of(name: str, run: Path) -> object:
    return READERS[name](run)


@pytest.mark.parametrize("name", READERS)
def test_no_file_is_no_record(tmp_path: Path, name: str) -> None:
    assert not read_of(name, tmp_path)
    (tmp_path / name).symlink_to("nowhere")
    assert not read_of(name, tmp_path)


@pytest.mark.parametrize("name", ["a.heartbeat", "b.heartbeat"])
@pytest.mark.parametrize("content", CONTENTS, ids=lambda value: getattr(value, "__name__", repr(value)[:20]))
def test_a_heartbeat_that_cannot_be_read_is_none(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], None]
) -> None:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    assert read_heartbeat(path) is None


PLACE = {"step": 1, "phase": "update", "since": 5.0}
START = {"at": 1.0, "after_step": None, "command": "", "host": ""}
TEXT = {"index": 0, "prompt": "", "response": "", "answer": {"any": []}, "reward": None, "passing": 0, "scored": 0}


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (RunPosition, [1], "expected an object, found a list"),
        (RunPosition, None, "expected an object, found null"),
        (RunPosition, {}, "it has no step"),
        (RunPosition, PLACE | {"more": 1}, "more is no field of it"),
        (RunPosition, PLACE | {"step": [1]}, "step: expected a whole number, found a list"),
        (RunPosition, PLACE | {"step": 1.5}, "step: expected a whole number, found 1.5"),
        (RunPosition, PLACE | {"since": float("inf")}, "since: expected less than 1e+11, found inf"),
        (RunPosition, PLACE | {"since": float("nan")}, "since: expected less than 1e+11, found nan"),
        (RunPosition, PLACE | {"since": -1}, "since: expected at least 0, found -1"),
        (RunPosition, PLACE | {"phase": {}}, "phase: expected 'start', "),
        (RunStart, START | {"command": None}, "command: expected a text, found null"),
        (RunStart, START | {"versions": [1]}, "versions: expected an object, found a list"),
        (RunStart, START | {"versions": {"torch": 2}}, "versions.torch: expected a text, found 2"),
        (RunHost, {"name": "a", "settings": 5}, "it has no address"),
        (EvaluationText, TEXT | {"reward": "1e"}, "reward: expected a number, found a text"),
        (
            FirstFailure,
            {"cause": "", "phase": "", "at": 1, "since": 1, "others": "x"},
            "others: expected a list, found",
        ),
        (Heartbeat, {"role": 5}, "role: expected a text, found 5"),
    ],
)
def test_a_wrong_field_is_named_in_words_of_json(kind: type, value: object, reason: str) -> None:
    with pytest.raises(JsonError) as error:
        record_of(kind, value)
    assert str(error.value).startswith(reason)


def test_sound_values_are_taken_as_they_are() -> None:
    assert record_of(RunPosition, PLACE) == RunPosition(1, "update", 5.0)
    assert record_of(EvaluationText, TEXT).answer == {"any": []}
    assert record_of(RunStart, START | {"command": "\ud800"}).command == "\ud800"  # half a character of a command line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1", "no comma at column 3"),
        ('{"a" 1}', "no colon at column 6"),
        ("{", "no name in double quotes at column 2"),
        ("nul", "no JSON value at column 1"),
        ('{"a":\n"x', "a text without an end at line 2, column 1"),
        ("1 2", "more text after the value at column 3"),
    ],
)
def test_a_slip_in_json_is_told_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(JsonError, match=f"^{reason}$"):
        parse_json(text)


@pytest.mark.parametrize("command", [["status"], ["logs", "--first-failure"], ["report"]])
def test_commands_refuse_a_damaged_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / RECIPE).write_text("name: x\n")
    (tmp_path / METRICS).write_text('{"phase": "train", "step": 1, "x": 1}\n{"phase": "train", "step": 1e999}\n')
    (tmp_path / PHASE).write_text(json.dumps(PLACE))
    (tmp_path / FAILURE).symlink_to("/dev/zero")
    if command == ["report"]:
        (tmp_path / METRICS).write_text('{"phase": "train", "step": 1, "x": 1}\n')
    assert main([*command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"hybridflow: {tmp_path / FAILURE}: is a device, expected a regular file\n"


def test_a_step_beyond_all_numbers_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RECIPE).write_text("name: x\n")
    (tmp_path / METRICS).write_text('{"phase": "train", "step": 3, "x": 1}\n{"phase": "train", "step": 1e999}\n')
    assert main(["status", str(tmp_path)]) == 0
    assert "train 3\n" in capsys.readouterr().out


def test_an_identity_is_read_with_bounds(tmp_path: Path) -> None:
    (tmp_path / RUN_IDENTITY).write_text("0123\n")
    assert run_identity(tmp_path) == "0123"
    (tmp_path / RUN_IDENTITY).write_text("x" * 5000)
    with pytest.raises(FileError, match="5,000 bytes, expected at most 4,096"):
        run_identity(tmp_path)


@pytest.mark.parametrize("command", [["status"], ["logs"]])
def test_what_a_terminal_would_obey_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / RECIPE).write_text("name: x\n")
    (tmp_path / METRICS).write_text(json.dumps({"phase": "e\x1b[2J\u202e", "step": 3, "\x1b]0;t\x07\r": 1}) + "\n")
    (tmp_path / FAILURE).write_text(json.dumps({"cause": "a\rb\u2066", "phase": "\x9b", "at": 1, "since": 1}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "ac\x1btor-0.log").write_text("one\x1b[31m\u202etwo\n")
    assert main([*command, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", printed)
    assert "one\\x1b[31m\\u202etwo" in printed
    assert command == ["logs"] or "a\\x0db\\u2066" in printed


def test_the_lock_of_a_run_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(UserError, match=rf"^name: cannot write to {tmp_path}/\.lock: No such device or address$"):
        hold(tmp_path, "name")


@pytest.mark.parametrize(
    "line", ["null", "[1]", "5", "{}", '{"phase": 1, "step": 1}', '{"phase": "train", "step": "x"}', '{"step": 1e999}']
)
def test_a_resumption_names_a_line_of_metrics_that_is_no_record(tmp_path: Path, line: str) -> None:
    (tmp_path / METRICS).write_text(f"{line}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl holds '.*', expected an object with phase and step$"):
        begin_lines(tmp_path / METRICS, 3)
