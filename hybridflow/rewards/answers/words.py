"""Answers that are recognised in their text: words, choices, dates, times of day and codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime

from sympy import Integer
from sympy.sets import Reals

from hybridflow.rewards.answers.compare import Choice, Exact, Items, Readings, Region, Word
from hybridflow.rewards.answers.text import FUNCTIONS, TEXT

_WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*[!?]?")
_RUN = re.compile(r"[^\W\d_]+")
_PRODUCT = re.compile(r"[bcdf-hj-np-tv-z]{2,6}|[a-d]{2,4}|a[xyz]+|[a-z]i|[a-z]")
"""Adjacent lower-case letters that are more likely variables than a word."""
_TIME_FORMATS = {
    "date": ("%Y-%m-%d", "%B %d %Y", "%d %B %Y", "%b %d %Y", "%d %b %Y"),
    "day": ("%B %d", "%d %B", "%b %d", "%d %b"),
    "time": ("%H:%M", "%H:%M:%S"),
    "time of a half day": ("%I:%M %p", "%I:%M:%S %p", "%I %p"),
}
_LETTER = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? )?(?:\(?([A-J])\)?[.:)]?|\(([a-h])\)|([a-d])\))")
_LETTERS = re.compile(r"(?=..)A?B?C?D?E?F?G?H?")
_LABELLED = re.compile(r"(?:\(([A-J])\)|([A-J])[.:)])\s*(?![-+*/^_=<>!,;'|)\]}])(\S.*)")
_ORDINAL = re.compile(r"(\d+) ?\^?\{? ?(?:st|nd|rd|th) ?\}?")
_CODE = re.compile(r"(?!Rs)[A-Za-z]{1,3}\d+|#\d+|\d+[A-Z]")
_ELEMENTS = re.compile(r"(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*){2,}|(?:[A-Z][a-z]?\d*)+ ?\^\{?\d*[+-]\}?")
_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen",
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBERS = {name: Integer(value) for value, name in enumerate(_ONES)} | {
    f"{ten}{mark}{one}" if one != "zero" else ten: Integer(10 * tens + ones)
    for tens, ten in enumerate(_TENS)
    for ones, one in enumerate(_ONES[:10])
    for mark in " -"
    if ten
}
_SYNONYMS = {"dne": "does not exist", "no limit": "does not exist"}
_MEANINGS = {
    **dict.fromkeys(
        ["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], Items("{}", ())
    ),
    **dict.fromkeys(["all real numbers", "all reals", "real numbers", "any real number", "reals"], Region(None, Reals)),
}


def plain(text: str) -> str:
    """Return an answer without the commands that make it text in LaTeX."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip().rstrip(".").strip()


def choices(letters: Iterable[str]) -> Word:
    """Return several choices as they are compared."""
    return Word(" and ".join(letters))


def word(text: str) -> Readings | None:
    """Recognise words and names in any script, but no names of functions and no products of variables."""
    text = plain(text)
    if not _WORDS.fullmatch(text):
        return None
    runs = _RUN.findall(text)
    if any(re.fullmatch(f"{FUNCTIONS}|and|or", run) for run in runs) or not any(map(_is_word, runs)):
        return None
    folded = text.casefold()
    stripped = re.sub(r"^(?:an?|the) (?=..)", "", folded)
    meanings = (_MEANINGS.get(folded.removeprefix("the ")), NUMBERS.get(folded))
    letters = [choices(text)] if _LETTERS.fullmatch(text) else []  # ACD
    return (
        Word(_SYNONYMS.get(stripped, stripped)),
        *(meaning for meaning in meanings if meaning is not None),
        *letters,
    )


def _is_word(run: str) -> bool:
    if len(run) == 1:
        return not run.isascii()
    return not (run.isascii() and run.islower() and _PRODUCT.fullmatch(run))


def possible_formula(text: str) -> str | None:
    """Return the formula that such an answer may be: AB, a name or a product, or 1st."""
    text = plain(text)
    if match := _ORDINAL.fullmatch(text):
        return match[1]
    if _LETTER.fullmatch(text):
        return text if "(" in text and text.islower() else None
    if _WORDS.fullmatch(text):
        mixed = text.isalpha() and len(text) == 2 and not text.islower()
        return text if text.isascii() and (text.isupper() or mixed) else None
    if match := re.fullmatch(r"#?(\d+)([A-Z]?)", text):
        return f"{match[1]} {match[2]}".strip()
    return text if "_" in text else None


def choice(text: str) -> Readings | None:
    """Recognise the letter of a choice: B, (B), (b), B) or B."""
    match = _LETTER.fullmatch(plain(text))
    return (Choice((match[1] or match[2] or match[3]).upper()),) if match else None


def labelled_choice(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and its text: (B) 12."""
    text = re.sub(r"^(?:\\text ?)?\{ ?(\(?[A-J]\)?[.:)]?) ?\}", r"\1 ", text)
    match = _LABELLED.fullmatch(text)
    return (match[1] or match[2], match[3]) if match else None


def moment(text: str) -> Readings | None:
    """Recognise a date, or a time of day, which may be a ratio without its half of the day."""
    text = plain(text)
    if match := re.fullmatch(r"(\d{1,2})/(\d{1,2})/(\d{4})", text):  # the month or the day first
        return (Exact("date with slashes", (int(match[1]), int(match[2]), int(match[3]))),)
    if not re.match(
        r"\d{4}-\d|\d{1,2}:\d\d(?!\d)|\d{1,2} ?[ap]\.? ?m|[A-Za-z]{3,9}\.? \d|\d+(?:st|nd|rd|th)? (?:of )?[A-Z]",
        text,
        re.I,
    ):
        return None
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)(?= |,|$)| of(?= )|[,.]", "", text)
    text = re.sub(r" ?([ap]) ?m$", r" \1m", text, flags=re.IGNORECASE)
    for kind, formats in _TIME_FORMATS.items():
        for time_format in formats:
            try:
                when = datetime.strptime(text, time_format)
            except ValueError:
                continue
            if kind in ("date", "day"):
                return (Exact("date", (when.year if kind == "date" else None, when.month, when.day)),)
            time = Exact("time", (when.hour, when.minute, when.second, kind != "time"))
            hours = Integer(text.partition(":")[0]) if ":" in text else None
            ratio = [Items(":", ((hours,), (Integer(when.minute),)))] if time_format == "%H:%M" else []
            return (time, *ratio)
    return None


def code(text: str) -> Readings | None:
    """Recognise ordinals, codes such as A1 and #1, and chemical formulas."""
    written = plain(text)
    text = written.replace(" ", "")
    if match := _ORDINAL.fullmatch(text):
        return (Exact("ordinal", int(match[1])),)
    elements = re.sub(r"_\{?(\d+)\}?", r"\1", text)
    if _ELEMENTS.fullmatch(elements) and any(character.isdigit() or character == "^" for character in elements):
        return (Word(elements),)
    return (Exact("code", text),) if _CODE.fullmatch(written) else None


KINDS: tuple[Callable[[str], Readings | None], ...] = (moment, choice, word, code)
