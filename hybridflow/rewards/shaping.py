"""Small rewards of the form of a text: `matches`, `length_limit`, `repetition`, `script`.

    reward:
      functions:
        - {name: math, path: math}
        - {name: format, path: matches, weight: 0.1, arguments: {pattern: "<think>.*</think>.*"}}
        - {name: length, path: length_limit, arguments: {soft: 2000, hard: 4000}}

Each gives one number a text, whatever the answer, and runs in the processes of reward functions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal


def matches(generated_texts: Sequence[str], *, pattern: str) -> list[float]:
    """1 if a regular expression of Python matches the complete text, line ends included in `.`; else 0.

    Raises ValueError for a pattern that is none.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
    return [float(compiled.fullmatch(text) is not None) for text in generated_texts]


def length_limit(
    generated_texts: Sequence[str], *, soft: int, hard: int, unit: Literal["characters", "words"] = "characters"
) -> list[float]:
    """0 up to a length of `soft`, from there falling evenly to -1 at `hard`, and -1 beyond (DAPO, 2503.14476, eq. 13).

    With `soft` = `hard` it falls at once. DAPO's own penalty goes by tokens: `algorithm.overlong_penalty`. Raises
    ValueError for limits out of order.
    """
    if unit not in ("characters", "words"):
        raise ValueError(f"unit={unit!r}, expected characters or words")
    if not all(isinstance(limit, int | float) for limit in (soft, hard)) or not 0 <= soft <= hard:
        raise ValueError(f"soft={soft!r}, hard={hard!r}, expected numbers, 0 <= soft <= hard")
    sizes = (len(text) if unit == "characters" else len(text.split()) for text in generated_texts)
    return [0.0 if size <= soft else -min(1.0, (size - soft) / max(1, hard - soft)) for size in sizes]


def repetition(generated_texts: Sequence[str], *, words: int = 3) -> list[float]:
    """Minus the share of a text's sequences of `words` words that occurred before: 0 without repetition.

    Raises ValueError for fewer than one word.
    """
    if not isinstance(words, int) or words < 1:
        raise ValueError(f"words={words!r}, expected a whole number, at least 1")
    rewards = []
    for text in generated_texts:
        split = text.split()
        sequences = [tuple(split[first : first + words]) for first in range(len(split) - words + 1)]
        rewards.append(len(set(sequences)) / len(sequences) - 1.0 if sequences else 0.0)
    return rewards


def script(generated_texts: Sequence[str], *, script: str) -> list[float]:
    """Share of a text's letters that belong to a script of Unicode, such as LATIN, CYRILLIC or CJK. 1 without letters.

    Raises ValueError for a script of which there is no letter.
    """
    name = str(script).upper()
    if not re.fullmatch(r"[A-Z][A-Z -]*", name) or not any(_is_of(chr(code), name) for code in range(0x30000)):
        raise ValueError(f"script={script!r}, expected one that Unicode names letters by, such as LATIN or CYRILLIC")
    rewards = []
    for text in generated_texts:
        letters = [character for character in text if character.isalpha()]
        rewards.append(sum(_is_of(letter, name) for letter in letters) / len(letters) if letters else 1.0)
    return rewards


def _is_of(character: str, script: str) -> bool:
    return character.isalpha() and unicodedata.name(character, "").startswith(f"{script} ")
