"""Kinds of answers that are numbers: residues, ratios, ranges, numbers in a base, and formulas."""

from __future__ import annotations

import re

import sympy

from hybridflow.rewards.answers.expression import formula
from hybridflow.rewards.answers.relations import Read
from hybridflow.rewards.answers.symbols import Formula
from hybridflow.rewards.answers.text import AND, OR, Token, Tokens, UnreadableError, source, split, tokens
from hybridflow.rewards.answers.values import Congruence, Exact, Ratio, Readings


def congruence(parts: Tokens, read: Read) -> Readings | None:
    """Recognise n \\equiv 1, 2 \\pmod 3."""
    del read
    at = next((i for i, each in enumerate(parts) if each.text in (r"\pmod", r"\mod", r"\bmod", "mod")), None)
    sides, marks = split(parts, (r"\equiv",))
    if at is None or (not marks and parts[at].text != r"\pmod"):
        return None
    if len(marks) > 1:
        raise UnreadableError("two congruences in one")
    left = sides[0] if marks else ()
    begin = len(left) + len(marks)
    inner = at - 1 if parts[at - 1].text == "(" and parts[-1].text == ")" else at
    modulus = parts[at + 1 : -1] if inner != at else parts[at + 1 :]
    residues = [each for each in split(parts[begin:inner], (",", *AND, *OR))[0] if each]
    return (Congruence(formula(left) if left else None, tuple(map(formula, residues)), formula(modulus)),)


def ratio(parts: Tokens, read: Read) -> Readings | None:
    """Recognise numbers in proportion: 2:3."""
    del read
    sides, marks = split(parts, (":", "to"))
    return (Ratio(tuple(map(formula, sides))),) if marks else None


def span(parts: Tokens, read: Read) -> Readings | None:
    """Recognise whole numbers from one to another, 10-20, which may be a difference."""
    del read
    found = re.fullmatch(r"(\d+) ?-{1,2} ?(\d+)", source(parts))
    if not found or int(found[1]) >= int(found[2]):
        return None
    return (Exact("span", (int(found[1]), int(found[2]))), formula(parts))


_DIGITS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "sixteen": 16,
}
_BASED = re.compile(
    r"(-?)(?:\(?([0-9][0-9A-Fa-f]*|[A-F][0-9A-F]+)\)?|\\text\{([0-9A-F]+)\})"
    r" ?_ ?\{?(?:\\text\{)?\(?(\d+|[a-z]+)\)?\}{0,2}"
)


def based(parts: Tokens, read: Read) -> Readings | None:
    """Recognise a number in another base: 101_2."""
    del read
    found = _BASED.fullmatch("".join(source(parts).split()))
    if not found or not (found[4].isdigit() or found[4] in _DIGITS):
        return None
    base = int(found[4]) if found[4].isdigit() else _DIGITS[found[4]]
    digits = found[2] or found[3]
    if not 2 <= base <= 36 or any(int(each, 36) >= base for each in digits):
        raise UnreadableError(f"{digits} is no number in base {base}")
    value = int(found[1] + digits, base)
    return (Formula(sympy.Integer(value)),) if base == 10 else (Exact("based", (value, base)),)


_EXPONENT = re.compile(r"([+-]?\d+(?:\.\d+)?) ?[eE] ?([+-]?\d{1,4})")


def whole_formula(parts: Tokens, read: Read) -> Readings | None:
    """Recognise a formula, a number with an exponent, 1.5e3, or one that continues, 0.333..."""
    del read
    if found := _EXPONENT.fullmatch(source(parts)):
        return (formula(tokens(f"{found[1]} \\times 10^{{{found[2]}}}")),)
    if parts[-1].text == r"\ldots" and len(parts) in (2, 3) and "." in parts[-2].text:
        number = parts[-2].text
        if number[-1] == number[-2] == number[-3]:
            number = f"{number[:-3]}\\overline{{{number[-1]}}}"
            return (formula((*parts[:-2], Token("repeating", number))),)
        return (formula(parts[:-1]),)
    loose, tight = formula(parts), formula(parts, tight=True)
    return (loose,) if loose == tight else (loose, tight)
