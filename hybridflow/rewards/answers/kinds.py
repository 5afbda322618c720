"""Kinds of answers. Each recogniser reads a whole answer of its kind, leaves it to the next one, or refuses it.

A reference answer that no kind reads completely gives no verdict. A given answer that none reads is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import sympy
from sympy import Symbol

from hybridflow.placeholders import NEVER_ANSWERS
from hybridflow.rewards.answers import words
from hybridflow.rewards.answers.compare import as_set, equal, solutions
from hybridflow.rewards.answers.equality import UndecidedError
from hybridflow.rewards.answers.expression import formula
from hybridflow.rewards.answers.numbers import based, congruence, ratio, span, whole_formula
from hybridflow.rewards.answers.quantities import quantity
from hybridflow.rewards.answers.relations import SIGNS, Read, has_sign, related
from hybridflow.rewards.answers.symbols import Formula
from hybridflow.rewards.answers.text import (
    AND,
    OR,
    Token,
    Tokens,
    UnreadableError,
    enclosed,
    normalise,
    source,
    split,
    tokens,
)
from hybridflow.rewards.answers.values import (
    Builder,
    Choice,
    Dots,
    Items,
    Named,
    Readings,
    Region,
    Relation,
    Value,
)

_MOST_DEPTH = 8
_MOST_TOKENS = 1_000
_BRACKETS = {"{": "}", "(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_NOTATION = {r"\{": "{", r"\}": "}", r"\langle": "<", r"\rangle": ">"}
_SETS = {
    "R": sympy.S.Reals,
    "Z": sympy.S.Integers,
    "N": sympy.S.Naturals,
    "Q": sympy.S.Rationals,
    "C": sympy.S.Complexes,
}
_GAP = re.compile(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])")
"""White space that separates nothing."""


def is_right(right: str, given: str, digits: int) -> bool:
    """True if a given answer equals the right one.

    Args:
        right: the reference answer.
        given: the answer to be judged.
        digits: decimals in which inexact numbers have to agree.

    Raises:
        UnreadableError: the reference answer is not completely understood.
        UndecidedError: the answers agree in one meaning of their notation and differ in another.
    """
    reference, answer = normalise(right), normalise(given)
    if (text := words.plain(reference).casefold()) in NEVER_ANSWERS or not text:
        raise UnreadableError("it stands for no answer")
    if _GAP.sub("", reference) == _GAP.sub("", answer):
        return True
    expected = read(reference)
    try:
        found = read(answer)
    except Exception:  # UnreadableError, or one of SymPy: the given answer's fault
        return False
    try:
        return equal(expected, found, digits)
    except UndecidedError:
        raise
    except Exception:  # of SymPy: the given answer's fault if the right one can be compared
        equal(expected, expected, digits)
        return False


@lru_cache(maxsize=256)
def read(text: str, depth: int = 0) -> Readings:
    """Read a normalised answer, or a part of one. Raises UnreadableError."""
    if depth > _MOST_DEPTH:
        raise UnreadableError("brackets in brackets in brackets")
    if labelled := words.labelled_choice(text):
        return (Choice(labelled[0], read(labelled[1], depth + 1)),)
    for recognise in TEXT_KINDS:
        if found := recognise(text):
            return (*found, *_as_formula(words.possible_formula(text)))
    if found := quantity(text):
        return found
    parts = tokens(text)
    if not 0 < len(parts) <= _MOST_TOKENS:
        raise UnreadableError("an empty part" if not parts else f"more than {_MOST_TOKENS:,} symbols")
    if parts[0].text == "]" or parts[-1].text == "[":  # an interval as ]0, 1[
        begin = Token("symbol", "(") if parts[0].text == "]" else parts[0]
        end = Token("symbol", ")") if parts[-1].text == "[" else parts[-1]
        parts = (begin, *parts[1:-1], end)
    for kind in KINDS:
        if found := kind(parts, lambda part: read(source(part), depth + 1)):
            return found
    raise UnreadableError(f"{text[:200]!r} is of no known kind")


def _as_formula(text: str | None) -> Readings:
    try:
        return () if text is None else quantity(text) or (formula(tokens(text)),)
    except UnreadableError:
        return ()


# Kinds, as recognisers of all tokens of an answer.


def cases(parts: Tokens, read: Read) -> Readings | None:
    """Recognise equations of a system, or values of a function with their conditions."""
    name = parts[0].text
    if not (name in (r"\begin{cases}", r"\begin{aligned}") and parts[-1].text.startswith(r"\end")):
        return None
    rows = [row for row in split(parts[1:-1], ("\\\\",))[0] if row]
    found: list[Readings] = []
    for row in rows:
        cells = [cell for cell in split(row, ("&",))[0] if cell]
        cells = [_without(cell, (",", ";", ".", "if", "for", "when", "where")) for cell in cells]
        if name == r"\begin{cases}" and len(cells) == 2 and not has_sign(cells[0]):
            found.append((Items("()", tuple(read(cell) for cell in cells)),))
        else:
            found.append(read(tuple(token for cell in cells for token in cell)))
    return (Items("", tuple(found)),)


def _without(parts: Tokens, marks: tuple[str, ...]) -> Tokens:
    while parts and parts[0].text in marks:
        parts = parts[1:]
    while parts and parts[-1].text in marks:
        parts = parts[:-1]
    return parts


def set_builder(parts: Tokens, read: Read) -> Readings | None:
    """Recognise a set by its condition: \\{x \\mid x > 2\\}."""
    if not (parts[0].text in (r"\{", "{") and enclosed(parts)):
        return None
    inside = parts[1:-1]
    for mark in (r"\mid", ":", "|"):
        sides, marks = split(inside, (mark,))
        if marks:
            variable, condition = sides[0], inside[len(sides[0]) + 1 :]
            break
    else:
        return None
    conditions = [each for each in split(condition, (",", *AND))[0] if each]
    name, sign = split(variable, (r"\in",))
    if sign and source(name[1]) != r"\mathbb{R}":
        conditions.append(variable)
    if len(name[0]) == 1 and name[0][0].kind == "letter":  # its name does not matter
        letter = name[0][0].text
        if not any(each.text == "x" for each in parts) or letter == "x":
            conditions = [_renamed(each, letter, "x") for each in conditions]
    read_conditions = [read(each) for each in conditions]
    regions = [_as_region(each[0]) for each in read_conditions]
    if all(each is not None for each in regions) and len({each.variable for each in regions if each}) == 1:
        return (_region(None, sympy.Intersection(*(each.values for each in regions if each))),)
    return (Builder((read(name[0]), *read_conditions)),)


def _renamed(parts: Tokens, old: str, new: str) -> Tokens:
    return tuple(Token("letter", new) if each.text == old and each.kind == "letter" else each for each in parts)


def _region(variable: Symbol | None, values: sympy.Set) -> Value:
    """A set of real numbers, those of a finite one as its items."""
    if isinstance(values, sympy.FiniteSet):
        return Items("{}", tuple((Formula(each),) for each in values))
    return Region(variable, values)


def _as_region(value: Value) -> Region | None:
    if isinstance(value, Region):
        return value
    if isinstance(value, Named) and isinstance(value.name, Symbol):
        values = as_set(value.values[0])
        if values is not None:
            return Region(value.name, values)
        value = value.relation or value
    return solutions(value) if isinstance(value, Relation) else None


def several(parts: Tokens, read: Read) -> Readings | None:
    """Recognise several answers, a sequence with dots, or conditions that hold together."""
    items, marks = split(parts, (",", ";", *AND, *OR))
    if not marks:
        return None
    signs = [has_sign(each) for each in items]
    if signs[0] and not any(signs[1:]) and items[0]:  # n = 5, 6, 7
        return None
    items = [each for at, each in enumerate(items) if each or not 0 < at < len(marks) or marks[at] not in ("and", "or")]
    if not all(items):
        raise UnreadableError("an empty item")
    if any(each[0].text == r"\ldots" for each in items):
        return (Dots(tuple(_item(each, read) for each in items)),)
    domain = items[-1]
    if (
        len(domain) > 2
        and domain[1].text == r"\in"
        and source(domain[2:]) in (r"\mathbb{Z}", r"\mathbb Z")
        and not any(each.text == "k" for each in parts)
    ):  # its name does not matter
        items = [_renamed(each, domain[0].text, "k") for each in items]
    found = tuple(read(each) for each in items)
    if len(found) > 1 and all(isinstance(each[0], Choice) and not each[0].content for each in found):
        letters = sorted(each[0].letter for each in found)  # type: ignore[union-attr]
        return (Items("", found), words.choices(letters))
    regions = [each[0] for each in found]
    if all(isinstance(each, Region) for each in regions) and len({each.variable for each in regions}) == 1:  # type: ignore[union-attr]
        sets = [each.values for each in regions]  # type: ignore[union-attr]
        both = sympy.Intersection(*sets)
        either = "or" in marks or (both is sympy.S.EmptySet and "and" not in marks)
        return (Region(regions[0].variable, sympy.Union(*sets) if either else both),)  # type: ignore[union-attr]
    integers = [
        isinstance(each, Region) and each.variable is not None and each.values == sympy.S.Integers for each in regions
    ]
    if any(integers) and not all(integers):  # + 2k pi, k \in \mathbb{Z}
        found = tuple(each for each, domain in zip(found, integers, strict=True) if not domain)
        if len(found) == 1:
            return found[0]
    flat: list[Readings] = []
    for each in found:  # \pm 1, \pm 2
        one = each[0]
        flat += one.items if isinstance(one, Items) and not one.brackets else [each]
    return (Items("", tuple(flat)),)


def _item(parts: Tokens, read: Read) -> Readings:
    return (words.DOTS,) if parts[0].text == r"\ldots" and len(parts) == 1 else read(parts)


def set_operation(parts: Tokens, read: Read) -> Readings | None:
    """Recognise sets of numbers with their names, unions, intersections and differences."""
    if source(parts) in (r"\emptyset", r"\{\}", r"\phi"):
        return (Items("{}", ()),)
    name = re.fullmatch(r"\\mathbb ?\{?([RZNQC])\}?(\^\{?[+*-]\}?|_\{?[+><]0?\}?)?", source(parts))
    if name:
        mark = (name[2] or "").strip("^_{}0")
        positive, negative = sympy.Interval.open(0, sympy.oo), sympy.Interval.open(-sympy.oo, 0)
        bounds = {"+": positive, ">": positive, "-": negative, "<": negative, "*": positive + negative}.get(mark)
        return (Region(None, sympy.Intersection(_SETS[name[1]], bounds) if bounds else _SETS[name[1]]),)
    operations = (
        (r"\cup", sympy.Union),
        (r"\cap", sympy.Intersection),
        (r"\setminus", sympy.Complement),
        ("-", sympy.Complement),
    )
    for mark, operation in operations:
        sides, marks = split(parts, (mark,))
        if not marks or not all(sides) or (operation is sympy.Complement and len(sides) != 2):
            continue
        if mark == "-" and (sides[0][0].text, sides[1][0].text) != (r"\mathbb", r"\{"):
            continue
        if not any(_is_set(each) for each in sides):
            return None  # of symbols
        values = [read(each) for each in sides]
        found = [as_set(each[0]) for each in values]
        if all(each is not None for each in found):
            return (Region(None, operation(*found)),)
        if mark == r"\cup" and all(isinstance(each[0], Items) for each in values):
            return (Items("", tuple(values)),)  # with symbols as ends
        raise UnreadableError("an operation with other than sets of numbers")
    return None


def _is_set(parts: Tokens) -> bool:
    return parts[0].text in ("[", r"\{", r"\mathbb") or (parts[0].text == "(" and "," in [each.text for each in parts])


def bracketed(parts: Tokens, read: Read) -> Readings | None:
    """Recognise tuples, intervals, sets and vectors."""
    if parts[0].text not in _BRACKETS or not enclosed(parts):
        return None
    begin, end = (_NOTATION.get(each.text, each.text) for each in (parts[0], parts[-1]))
    items, marks = split(parts[1:-1], (",", ";"))
    if not marks and parts[0].text == "{":  # of LaTeX, and no set that lost its backslashes
        return None
    if not marks and (begin, end) in (("(", ")"), ("[", "]")):
        return read(parts[1:-1]) if split(parts[1:-1], SIGNS)[1] or _is_wrapped(parts[1:-1]) else None
    if begin + end not in ("()", "(]", "[)", "[]", "{}", "<>"):
        raise UnreadableError(f"brackets {begin} and {end}")
    if len(set(marks)) > 1:
        raise UnreadableError("commas and semicolons in one list")
    if any(each and each[0].text == r"\ldots" for each in items):
        return (Dots(tuple(_item(each, read) for each in items)),)
    found: list[Readings] = []
    for each in (read(each) for each in items):
        one = each[0]
        if isinstance(one, Items) and not one.brackets and begin != "{":
            raise UnreadableError("several values in one place of a tuple")
        found += one.items if isinstance(one, Items) and not one.brackets else [each]
    return (Items(begin + end, tuple(found)),)


def _is_wrapped(parts: Tokens) -> bool:
    """True for a matrix or a set in parentheses."""
    return bool(parts) and (parts[0].text.startswith(r"\begin") or parts[0].text in (r"\{", "[", "("))


def signs(parts: Tokens, read: Read) -> Readings | None:
    """Recognise two values: 3 \\pm 2."""
    if not any(each.text in (r"\pm", r"\mp") for each in parts):
        return None
    both = []
    for plus, minus in ("+-", "-+"):
        marks = {r"\pm": plus, r"\mp": minus}
        both.append(read(tuple(Token("symbol", marks[each.text]) if each.text in marks else each for each in parts)))
    return (Items("", tuple(both)),)


TEXT_KINDS: tuple[Callable[[str], Readings | None], ...] = (
    words.date,
    words.clock,
    words.choice,
    words.word,
    words.code,
)
"""Kinds that are recognised in the text."""
KINDS: tuple[Callable[[Tokens, Read], Readings | None], ...] = (
    cases,
    set_builder,
    congruence,
    several,
    related,
    set_operation,
    bracketed,
    signs,
    based,
    ratio,
    span,
    whole_formula,
)
"""Kinds that are recognised in the tokens, with a reader of parts. The first that recognises an answer reads it."""
