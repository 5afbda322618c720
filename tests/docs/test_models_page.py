"""The matrix of features is what the marks of the tests say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.proves import proves

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_and_the_data_of_check_are_what_the_marks_say() -> None:
    command = [sys.executable, "docs/generate_models.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mark_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="family 'gpt', expected one of llama, "):
        proves("gpt", "tp")
    with pytest.raises(ValueError, match=r"\['packed'\], expected names of tp, "):
        proves("llama", "tp packed")
