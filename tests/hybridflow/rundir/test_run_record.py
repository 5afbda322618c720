"""The record of a run's starts and its result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.rundir.file_names import RUN_RECORD
from hybridflow.rundir.run_record import command_line, read_run_record, record_end, record_start


def test_resumptions_are_added_and_the_end_keeps_them(tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    record_end(tmp_path, ["of a run that wrote none"])
    assert read_run_record(tmp_path) is None
    record_start(tmp_path, None, {"torch": "2.11.0"}, "abc", 30, 20)
    record_start(tmp_path, 4, {"torch": "2.12.0"}, None, 30, 20)
    record_end(tmp_path, ["held-out accuracy: 0.5"])
    record = read_run_record(tmp_path)
    assert record is not None and record.ended is not None and record.ended >= record.starts[1].at
    assert [(start.after_step, start.commit, dict(start.versions)) for start in record.starts] == [
        (None, "abc", {"torch": "2.11.0"}),
        (4, None, {"torch": "2.12.0"}),
    ]
    assert (record.parameters, record.active_parameters, record.results) == (30, 20, ("held-out accuracy: 0.5",))


def test_the_command_line_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "my recipe.yaml", "seed=2", "judge.api_key=abc", "data.files.prompt_key=question"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/hybridflow/__main__.py", *words])
    expected = "hybridflow train 'my recipe.yaml' seed=2 'judge.api_key=<redacted>' data.files.prompt_key=question"
    assert command_line() == expected
    words = ["--api-key", "abc", "--api-key=abc", "reward.functions=[{name: a, arguments: {api_key: abc}}]"]
    monkeypatch.setattr(sys, "argv", ["loop.py", *words])
    assert "abc" not in command_line() and command_line().startswith("loop.py --api-key '<redacted>' ")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/hybridflow", "resume", "runs/demo"])
    assert command_line() == "hybridflow resume runs/demo"


@pytest.mark.parametrize("text", ["{}", '{"starts": []}', '{"starts": [{"at": "x"}]}', "[]", "{", '{"starts": 3}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_RECORD).write_text(text)
    with pytest.raises(UserError, match=RUN_RECORD):
        read_run_record(tmp_path)
