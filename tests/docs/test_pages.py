"""Quotes on the pages equal the files they quote, and links lead to existing targets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/**/README.md", "engine3d/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE = re.compile(r"^(```|~~~).*?^\1|^ {4,}.*?$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(<?([^)\s>]+)")
SOURCE = re.compile(r"`((?:hybridflow|examples)/[a-z_/]+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["adding_an_algorithm.md"])
def test_quoted_code_is_in_the_file_that_is_named(page: str) -> None:
    quoted = SOURCE.findall((ROOT / "docs" / page).read_text())
    assert len(quoted) == 2
    for path, code in quoted:
        assert code in (ROOT / path).read_text()


def _anchors(page: Path) -> Iterator[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them where no heading is there twice."""
    for heading in re.findall(r"^#+ +(.*?) *#*$", CODE.sub("", page.read_text()), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(INLINE_CODE.sub("", CODE.sub("", page.read_text()))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES)
def test_links_point_at_what_exists(page: str) -> None:
    assert list(_broken_links(ROOT / page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page's head\n[a](#a-pages-head) [b](#other) [c](none.md) [d](page.md) `[e](f)` [g](https://h)\n"
    )
    assert list(_broken_links(page)) == ["#other", "none.md"]


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}
