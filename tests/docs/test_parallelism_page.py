"""Examples and refusals on the page of parallel sizes are what the functions compute."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs/generate_parallelism.py"


def test_the_page_is_what_the_functions_compute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


def test_another_number_is_found() -> None:
    generator: dict[str, Any] = runpy.run_path(str(PROGRAM))
    text = (ROOT / "docs/parallelism.md").read_text()
    assert text.count("<!-- table ") == text.count("<!-- end -->") == 3
    changed = text.replace("| 0 % |", "| 1 % |", 1)
    assert changed != text and generator["page"](changed) == generator["page"](text)
