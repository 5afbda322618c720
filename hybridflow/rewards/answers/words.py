"""Answers that are no formulas: words, choices, dates, times of day, ordinals and codes."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Iterable

from sympy import Integer
from sympy.sets import Reals

from hybridflow.rewards.answers.symbols import Formula
from hybridflow.rewards.answers.text import PLAIN, TEXT, names
from hybridflow.rewards.answers.values import Choice, Exact, Items, Ratio, Readings, Region, Value, Word

DOTS = Word("...")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*[!?]?")
_RUN = re.compile(r"[^\W\d_]+")
_PRODUCT = re.compile(r"[bcdf-hj-np-tv-z]{2,6}|[a-d]{2,4}|a[xyz]+|[a-z]i|[a-z]")
"""Lower-case letters side by side that are variables more likely than a word."""
_ISO = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_MONTHS = names("january february march april may june july august september october november december")
_MONTH_FIRST = re.compile(r"([A-Za-z]{3,9})\.? (\d{1,2})(?:st|nd|rd|th)?(?:,? (\d{4}))?")
_DAY_FIRST = re.compile(r"(\d{1,2})(?:st|nd|rd|th)? (?:of )?([A-Za-z]{3,9})\.?(?:,? (\d{4}))?")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))? ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_HOUR = re.compile(r"(\d{1,2}) ?([ap])\.? ?m\.?", re.IGNORECASE)
_LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? )?(?:\(?([A-J])\)?[.:)]?|\(([a-h])\)|([a-d])\))")
_LETTERS = re.compile(r"(?=..)A?B?C?D?E?F?G?H?")
_LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])[.:)])\s*(?![-+*/^_=<>!,;'|)\]}])(\S.*)")
_ORDINAL = re.compile(r"(\d+) ?\^?\{? ?(?:st|nd|rd|th) ?\}?")
_CODE = re.compile(r"(?!Rs)[A-Za-z]{1,3}\d+|#\d+|\d+[A-Z]")
_ELEMENTS = re.compile(r"(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*){2,}|(?:[A-Z][a-z]?\d*)+ ?\^\{?\d*[+-]\}?")
_UNITS = names(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = {
    each: 10 * index
    for index, each in enumerate(names("twenty thirty forty fifty sixty seventy eighty ninety"), start=2)
}
_SYNONYMS = {"dne": "does not exist", "no limit": "does not exist"}
_NOTHING, _ALL = Items("{}", ()), Region(None, Reals)
_MEANINGS: dict[str, Value] = {
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], _NOTHING),
    **dict.fromkeys(["all real numbers", "all reals", "real numbers", "any real number", "reals"], _ALL),
}


def plain(text: str) -> str:
    """Return an answer without the commands that make it text in LaTeX."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip().rstrip(".").strip()


def spelled(text: str) -> Word:
    """Return words as they are compared: whatever their case and white space."""
    folded = re.sub(r"^(?:an?|the) (?=..)", "", re.sub(r"\s+", " ", text.replace("’", "'")).strip().casefold())
    return Word(_SYNONYMS.get(folded, folded))


def choices(letters: Iterable[str]) -> Word:
    """Return several choices as they are compared."""
    return Word(" and ".join(letters))


def word(text: str) -> Readings | None:
    """Recognise words and names in any script, but no names of functions and no products of variables."""
    text = plain(text)
    if not _WORDS.fullmatch(text):
        return None
    runs = _RUN.findall(text)
    if any(run in (*PLAIN, "and", "or") for run in runs) or not any(_is_word(run) for run in runs):
        return None
    found: list[Value] = [spelled(text)]
    if text.casefold().removeprefix("the ") in _MEANINGS:
        found.append(_MEANINGS[text.casefold().removeprefix("the ")])
    if (number := _number(text.casefold())) is not None:
        found.append(Formula(Integer(number)))
    if _LETTERS.fullmatch(text):  # ACD
        found.append(choices(text))
    return tuple(found)


def _is_word(run: str) -> bool:
    if len(run) == 1:
        return not run.isascii()
    return not (run.isascii() and run.islower() and _PRODUCT.fullmatch(run))


def _number(text: str) -> int | None:
    parts = re.split(r"[ -]", text)
    if len(parts) == 1:
        return _UNITS.index(text) if text in _UNITS else _TENS.get(text)
    if len(parts) == 2 and parts[0] in _TENS and parts[1] in _UNITS[1:10]:
        return _TENS[parts[0]] + _UNITS.index(parts[1])
    return None


def possible_formula(text: str) -> str | None:
    """Return the formula that such an answer may be: AB, a name or a product, or 1st."""
    text = plain(text)
    if found := _ORDINAL.fullmatch(text):
        return found[1]
    if _LETTER.fullmatch(text):
        return text if "(" in text and text.islower() else None
    if _WORDS.fullmatch(text):
        mixed = text.isalpha() and len(text) == 2 and not text.islower()
        return text if text.isascii() and (text.isupper() or mixed) else None
    if found := re.fullmatch(r"#?(\d+)([A-Z]?)", text):
        return f"{found[1]} {found[2]}"
    if "_" in text:
        return text
    return None


def choice(text: str) -> Readings | None:
    """Recognise the letter of a choice: B, (B), (b), B) or B."""
    text = plain(text)
    if found := _LETTER.fullmatch(text):
        return (Choice((found[1] or found[2] or found[3]).upper()),)
    return None


def labelled_choice(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and its text: (B) 12."""
    text = re.sub(r"^\\(?:text\w*|mathrm|mathbf) ?\{ ?(\(?[A-J]\)?[.:)]?) ?\}", r"\1 ", text)
    found = _LABELLED.fullmatch(text)
    return (found[1] or found[2], found[3]) if found else None


def date(text: str) -> Readings | None:
    """Recognise a day: 2024-01-05, 01/05/2024, January 5, 2024."""
    text = plain(text)
    if found := _ISO.fullmatch(text):
        return (Exact("date", (int(found[1]), int(found[2]), int(found[3]))),)
    if found := _SLASHES.fullmatch(text):  # the month or the day first
        return (Exact("date with slashes", (int(found[1]), int(found[2]), int(found[3]))),)
    for pattern, month, day in ((_MONTH_FIRST, 1, 2), (_DAY_FIRST, 2, 1)):
        found = pattern.fullmatch(text)
        months = [each for each in _MONTHS if found and each.startswith(found[month].lower())]
        if found and len(months) == 1:
            year = int(found[3]) if found[3] else None
            return (Exact("date", (year, _MONTHS.index(months[0]) + 1, int(found[day]))),)
    return None


def clock(text: str) -> Readings | None:
    """Recognise a time of day: 11:30, 2:30 p.m., 7 am. Without its half of the day it may be a ratio."""
    text = plain(text)
    found = _CLOCK.fullmatch(text + ("." if re.search(r"[ap]\.m$", text) else ""))
    if found and int(found[1]) <= 24 and int(found[2]) < 60:
        half = (found[4] or "").lower()
        time = Exact("time", (_hour(int(found[1]), half), int(found[2]), int(found[3] or 0), half != ""))
        return (time,) if half or found[3] else (time, Ratio((Formula(Integer(found[1])), Formula(Integer(found[2])))))
    if found := _HOUR.fullmatch(text + ("." if re.search(r"[ap]\.m$", text) else "")):
        return (Exact("time", (_hour(int(found[1]), found[2].lower()), 0, 0, True)),)
    return None


def _hour(hour: int, half: str) -> int:
    return hour % 12 + (12 if half == "p" else 0) if half else hour


def code(text: str) -> Readings | None:
    """Recognise ordinals, codes such as A1 and #1, and chemical formulas."""
    written = plain(text)
    text = written.replace(" ", "")
    if found := _ORDINAL.fullmatch(text):
        return (Exact("ordinal", int(found[1])),)
    elements = re.sub(r"_\{?(\d+)\}?", r"\1", text)
    if _ELEMENTS.fullmatch(elements) and any(each.isdigit() or each == "^" for each in elements):
        return (Word(elements),)
    if _CODE.fullmatch(written):
        return (Exact("code", text),)
    return None
