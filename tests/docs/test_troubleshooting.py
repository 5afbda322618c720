"""The lines that docs/troubleshooting.md explains are those that the program says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@cache
def texts() -> list[str]:
    """Every text in the source, with a null character in place of what is put into it."""
    literals = []
    for package in ("hybridflow", "engine3d"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    literals.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    segments = (segment.value if isinstance(segment, ast.Constant) else "\0" for segment in node.values)
                    literals.append("".join(map(str, segments)))
    return literals


@pytest.mark.slow
@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_line_is_in_the_source(quoted: str) -> None:
    fragments = [re.escape(fragment) for fragment in quoted.split("…") if fragment.strip(" :;,.()")]
    assert any(re.search(".*".join(fragments), text, re.DOTALL) for text in texts())


def test_no_line_stands_there_twice() -> None:
    assert len(QUOTED) == len(set(QUOTED)) > 50
