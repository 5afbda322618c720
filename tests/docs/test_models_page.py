"""The matrix of features is what the marks of the tests say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.proves import proves

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_and_the_data_of_check_are_what_the_marks_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ROOT / "docs/generate_models.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_mark_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="family 'gpt', expected one of llama, "):
        proves("gpt", "tp")
    with pytest.raises(ValueError, match=r"\['packed'\], expected names of tp, "):
        proves("llama", "tp packed")
