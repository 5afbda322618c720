"""docs/coming_from.md is what the tables behind the messages say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_tables_say() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate_coming_from.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
