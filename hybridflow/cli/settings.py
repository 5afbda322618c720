"""`hybridflow settings`: shows the settings of recipes with type, default and meaning."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from engine3d.errors import UserError, shortened
from engine3d.startup.imports import quick_imports

if TYPE_CHECKING:
    from hybridflow.config.reading.described_settings import Described

_WIDTH, _INDENT = 110, "    "
_ALIKE, _MOST_ALIKE = 0.7, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow settings`."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="of a setting or a group, such as train.optimizer or lr; all groups if absent",
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: there is no such setting. The message names those that are meant by it, or alike.
    """
    with quick_imports():
        from hybridflow.config.reading.described_settings import all_settings

    settings = all_settings()
    if parsed.name is None:
        print("\n".join(_overview(settings)))
        return 0
    name = parsed.name.partition("=")[0].lstrip("-").rstrip(".")
    print("\n\n".join("\n".join(_lines(setting)) for setting in _named(settings, name)))
    return 0


def _overview(settings: Sequence[Described]) -> Iterator[str]:
    """Every group and setting at the top, in a line or two each."""
    for setting in settings:
        if "." not in setting.path:
            about = setting.meaning.partition(". ")[0].rstrip(".").replace("`", "")
            yield from textwrap.wrap(f"{setting.path:<20} {about}", _WIDTH, subsequent_indent=" " * 21)
    yield ""
    yield "hybridflow settings NAME shows a setting, or all settings of a group such as train.optimizer."


def _named(settings: Sequence[Described], name: str) -> list[Described]:
    """A setting, the settings of a group, or those of a name in any group."""
    name = name.replace("-", "_")
    matches = [setting for setting in settings if _pattern(setting.path).fullmatch(name)]
    if matches:
        paths = tuple(setting.path for setting in matches)
        return [setting for setting in settings if setting.path.startswith(paths) and _is_within(setting.path, paths)]
    matches = [setting for setting in settings if setting.path.rpartition(".")[2] == name]
    if matches:
        return matches
    raise UserError(f"{shortened(name)}: no such setting: {_suggested(settings, name)}")


def _is_within(path: str, groups: Sequence[str]) -> bool:
    return any(path == group or path.startswith((f"{group}.", f"{group}[")) for group in groups)


def _pattern(path: str) -> re.Pattern[str]:
    """Names of a setting as a recipe has them: `NAME` is any name, and `[]` any index or nothing."""
    text = re.escape(path).replace(re.escape("[]"), r"(\[\d*\]|\.\d+)?")
    return re.compile(re.sub(r"\bNAME\b", r"[^.\\[\\]]+", text))


def _suggested(settings: Sequence[Described], name: str) -> str:
    """Settings that others call so, or whose names are alike."""
    from hybridflow.config.reading.error_messages import suggestion
    from hybridflow.config.recipe import Recipe

    text = suggestion(Recipe, tuple(name.split(".")), None, None)
    if " takes " not in text:  # which is all that it can say of other names
        return text
    alike = {setting.path: setting.path for setting in settings} | {
        setting.path.rpartition(".")[2]: setting.path for setting in settings
    }
    near = difflib.get_close_matches(name, alike, n=_MOST_ALIKE, cutoff=_ALIKE)
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(alike[candidate] for candidate in near))}?"
    foreign = difflib.get_close_matches(name, Recipe.other_names, n=1, cutoff=_ALIKE)
    return f"{foreign[0]}: {Recipe.other_names[foreign[0]]}" if foreign else "hybridflow settings lists them"


def _lines(setting: Described) -> Iterator[str]:
    yield setting.path
    if setting.type:
        default = setting.default if not setting.is_value else f"default {setting.default or repr('')}"
        yield from _wrapped(f"{setting.type}; {default}")
    yield from _wrapped(setting.meaning)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text.replace("`", ""),
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
