"""Checkpoints described in lines of text."""

from __future__ import annotations

from pathlib import Path

from engine3d.checkpoint.manifest import write_manifest
from engine3d.checkpoint.reading.inspect import inspect_checkpoint
from tests.support.small_checkpoints import describe, make_checkpoint


def test_no_control_character_of_a_manifest_reaches_a_terminal(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    software = {"a\x1b[31m": "1\nstep 99, saved", "b": "\x9b2J"}
    write_manifest(directory, describe(directory, created="\x1b]0;title\x07", software=software))
    lines = inspect_checkpoint(directory).splitlines()
    assert lines[1] == "step 12, saved \\x1b]0;title\\x07"
    assert "software: a\\x1b[31m 1\\x0astep 99, saved, b \\x9b2J" in lines
