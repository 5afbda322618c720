"""Completeness of every algorithm's documentation: a page, a row in the table, a recipe, and its source."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from hybridflow.algorithms.config import load
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.config.reading.yaml_loader import read_with_bases

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"\| \[`(\w+)`\]\((algorithms/\w+\.md)\) \|")
_LINK = re.compile(r"\(\.\./(launch/recipes/[\w/]+\.yaml)\)")


def rows() -> dict[str, list[str]]:
    """The cells of each row of the table, by the name in the first."""
    lines = (ROOT / "docs/algorithms.md").read_text().splitlines()
    results = {}
    for line in lines:
        if match := _ROW.match(line):
            results[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return results


def test_the_table_has_every_algorithm_once() -> None:
    text = (ROOT / "docs/algorithms.md").read_text()
    assert sorted(match[1] for match in _ROW.finditer(text)) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_a_page_a_row_a_recipe_and_a_source(name: str) -> None:
    cells = rows()[name]
    assert len(cells) >= 7
    assert all(cells), f"an empty cell in the row of {name}"
    match = _ROW.match(f"| {cells[0]} |")
    assert match is not None
    page = (ROOT / "docs" / match[2]).read_text()
    assert f"`{name}`" in page or f"algorithm.name={name}`" in page
    assert match[2] in (ROOT / "mkdocs.yml").read_text()
    link = _LINK.search(cells[6])
    assert link is not None
    recipe, _ = read_with_bases(ROOT / link[1])
    assert recipe.get("algorithm", {}).get("name", "grpo") == name
    assert Path(link[1]).name in page
    module = sys.modules[load(name).settings.__module__]
    assert re.search(r"arXiv:\d{4}\.\d{5}", inspect.getdoc(module) or "")
