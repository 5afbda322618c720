"""The pages of settings are what the models of the settings say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_models_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = ROOT / "docs" / "generate_configuration.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err
