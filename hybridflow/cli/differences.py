"""Two texts beside each other, with what differs marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

Part = tuple[str, str]
"""Some text and the style that `rich` is to show it in."""

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MOST_WORDS = 4000
"""Of either text: comparing takes the square of it."""


def marked(expected: str, found: str) -> tuple[list[Part], list[Part]]:
    """What only the first has in `[-...-]`, and what only the second has in `{+...+}`, word by word.

    Texts of very many words are compared line by line.
    """
    one, other = _WORDS.findall(expected), _WORDS.findall(found)
    if max(len(one), len(other)) > _MOST_WORDS:
        one, other = expected.splitlines(keepends=True), found.splitlines(keepends=True)
    before: list[Part] = []
    after: list[Part] = []
    for kind, first, last, start, end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            before.append(("".join(one[first:last]), ""))
            after.append(("".join(other[start:end]), ""))
            continue
        before += _mark(one[first:last], "[-{}-]", "red")
        after += _mark(other[start:end], "{{+{}+}}", "green")
    return before, after


def _mark(words: Sequence[str], form: str, style: str) -> list[Part]:
    return [(form.format("".join(words)), style)] if words else []
