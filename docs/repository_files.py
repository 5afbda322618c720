"""Hooks of MkDocs: files of the repository that pages link to become pages of the site, so that links work in both.

A page links to a file by its relative path, as on a code host: `../launch/recipes/demo.yaml`. On the site that file
stands under `repository/`: Markdown as a page, other text in a code block, all else as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SHOWN_AS_CODE = (".py", ".yaml", ".yml", ".toml", ".txt", ".sh", "Makefile", "Dockerfile", "LICENSE")

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCED = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_sources: dict[str, Path] = {}
"""The file of the repository that each Markdown page of the site is made of, by its name there."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add every file of the repository that a page links to, and those that these link to."""
    _sources.clear()
    _sources.update({file.src_uri: DOCS / file.src_uri for file in files if file.is_documentation_page()})
    waiting = list(_sources.values())
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if files.get_file_from_path(name := _name(target)) is not None:
                continue
            if target.suffix == ".md":
                files.append(File.generated(config, name, content=target.read_text()))
                _sources[name] = target
                waiting.append(target)
            elif target.name.endswith(SHOWN_AS_CODE):
                title = target.relative_to(ROOT)
                content = f"# `{title}`\n\n~~~~~~text\n{target.read_text()}\n~~~~~~\n"
                files.append(File.generated(config, name, content=content))
            else:
                files.append(File.generated(config, name, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository, so that they lead to the site's copies."""
    source = _sources.get(page.file.src_uri)
    if source is None:
        return markdown

    def lead(link: re.Match[str]) -> str:
        if _is_elsewhere(link[1]):
            return link[0]
        name = _name((source.parent / link[1]).resolve())
        return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".") + (link[2] or "")

    blocks = _FENCED.split(markdown)
    return "".join(block if block.startswith("`") else _LINK.sub(lead, block) for block in blocks)


def _targets(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    text = "".join(block for block in _FENCED.split(page.read_text()) if not block.startswith("`"))
    for link in (match[1] for match in _LINK.finditer(text)):
        if _is_elsewhere(link):
            continue
        target = (page.parent / link).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            raise PluginError(f"{page.relative_to(ROOT)}: {link} is no file of the repository")
        yield target


def _is_elsewhere(link: str) -> bool:
    return bool(re.match(r"[a-z]+:", link))


def _name(target: Path) -> str:
    """The name of a file of the repository on the site."""
    if target.is_relative_to(DOCS) and target.suffix != ".py":
        return target.relative_to(DOCS).as_posix()
    path = f"repository/{target.relative_to(ROOT).as_posix()}"
    return f"{path}.md" if target.name.endswith(SHOWN_AS_CODE) else path
