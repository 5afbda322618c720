"""Equations, inequalities, memberships, and chains of these."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import sympy
from sympy import Rational, Symbol

from hybridflow.rewards.answers import words
from hybridflow.rewards.answers.compare import as_set, solutions
from hybridflow.rewards.answers.equality import same
from hybridflow.rewards.answers.expression import formula
from hybridflow.rewards.answers.symbols import Formula
from hybridflow.rewards.answers.text import Token, Tokens, UnreadableError, enclosed, source, split
from hybridflow.rewards.answers.values import Either, Items, Named, Quantity, Readings, Region, Relation, Value

SIGNS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\notin", r"\approx")
_CLOSE = 0.05
"""Share in which an approximation may differ from what it approximates."""
Read = Callable[[Tokens], Readings]
"""A reader of a part of an answer."""


def related(parts: Tokens, read: Read) -> Readings | None:
    """Recognise equations, inequalities, memberships, and chains of these."""
    sides, signs = split(parts, SIGNS)
    if not signs:
        return None
    if not sides[0] and signs[0] in ("=", r"\approx"):  # = 5
        return read(parts[1:])
    if signs == [r"\ne"] and (marks := [each for each in parts if each.text == r"\pm"]):  # x \ne \pm 1
        both = [tuple(Token("symbol", mark) if each in marks else each for each in parts) for mark in "+-"]
        return read((*both[0], Token("symbol", ","), *both[1]))
    if set(signs) <= {"=", r"\approx"}:
        return (_equation(sides, signs, read),)
    if len(signs) == 1 and signs[0] in (r"\in", r"\notin"):
        return (_membership(sides[0], sides[1], signs[0], read),)
    if r"\in" in signs or r"\notin" in signs or r"\approx" in signs:
        raise UnreadableError("a chain of relations of several kinds")
    if not sides[0] and len(sides) == 2:  # < 5
        sides[0] = (Token("letter", "x"),)
        (found,) = _inequality(sides, signs)
        return (Region(None, found.values),) if isinstance(found, Region) else (found,)
    return _inequality(sides, signs)


def _equation(sides: list[Tokens], signs: list[str], read: Read) -> Value:
    values = [read(each) for each in sides[1:]]
    name = _name(sides[0])
    if len(sides) == 2 and name is None and (names := _names(sides[0])) and isinstance(values[0][0], Items):
        items = values[0][0].items
        if len(items) == len(names):  # (x, y) = (1, 2)
            return Items("", tuple((Named(*pair),) for pair in zip(names, items, strict=True)))
    if name is None and len(sides) == 2 and _name(sides[1]) is not None and signs == ["="]:
        return _equation(sides[::-1], signs, read)
    if name is None:
        values.insert(0, read(sides[0]))
    exactly = values[: (len(signs) - signs[::-1].index("=") if "=" in signs else 0) + (name is None)]
    approximate = values[len(exactly) :]
    _check_chain([each[0] for each in exactly], exactly=True)
    _check_chain([each[0] for each in (exactly[-1:] + approximate)], exactly=False)
    value = exactly[-1] if exactly else approximate[0]
    if approximate and exactly:
        value = (Either((*exactly[-1], *approximate[-1])),)
    if name is not None:
        one = value[0]
        relation = None
        if isinstance(one, Formula) and isinstance(name, Symbol) and not isinstance(one.value, sympy.MatrixBase):
            relation = Relation("=", Formula(name - one.value, one.exact))
        if isinstance(name, str):  # of a segment, and not of what the question asks for, such as Area
            name = Symbol(name) if name.isupper() else None
        return Named(name, value, relation)  # type: ignore[arg-type]
    first, last = values[0][0], value[0]
    if (
        isinstance(first, Formula)
        and isinstance(last, Formula)
        and (first.value.free_symbols or last.value.free_symbols)
    ):
        if isinstance(first.value, sympy.MatrixBase) or isinstance(last.value, sympy.MatrixBase):
            raise UnreadableError("an equation of matrices")
        total = last if last.value.is_number and len(first.value.free_symbols) > 1 else None
        return Relation("=", Formula(first.value - last.value, first.exact and last.exact), total)
    if not all(isinstance(each[0], Formula | Quantity | Either) for each in (values[0], value)):
        raise UnreadableError("an equation of other than numbers")
    return value[0]


def _name(parts: Tokens) -> object | None:
    """Read the name of an answer before an equals sign: a symbol, a function of one, or words; None for a formula."""
    text = words.plain(source(parts))
    if words.word(text) or re.fullmatch(r"\\mathrm ?\{?[A-Za-z]+\}?", text):
        return text
    try:
        found = formula(parts).value
    except UnreadableError:
        return None
    if isinstance(found, Symbol) or (
        isinstance(found, sympy.core.function.AppliedUndef) and len(parts) < 11 and found.args[0].is_Symbol
    ):
        return found
    call = re.fullmatch(r"([A-Za-z])(?:_\{?\w+\}?)? ?\([a-z](?:, ?[a-z])*\)", text)  # P(x)
    return Symbol(f"{call[1]}()") if call else None


def _names(parts: Tokens) -> list[Symbol]:
    """Names of several values, in brackets."""
    if parts[0].text not in ("(", r"\{") or not enclosed(parts):
        return []
    found = [_name(each) for each in split(parts[1:-1], (",",))[0] if each]
    return [each for each in found if isinstance(each, Symbol)]


def _check_chain(values: list[Value], *, exactly: bool) -> None:
    """Raises UnreadableError for a chain such as 5 = 7, whose numbers differ."""
    numbers = [each for each in values if isinstance(each, Formula | Quantity)]
    plain = [each if isinstance(each, Formula) else each.number for each in numbers]
    plain = [each for each in plain if not isinstance(each.value, sympy.MatrixBase) and each.value.is_number]
    for one, other in pairwise(plain):
        a, b = (sympy.N(each.value, 30) for each in (one, other))
        if exactly and one.exact and other.exact:
            wrong = not same(one, other, 6)
        else:
            wrong = not abs(a - b) <= (_CLOSE if not exactly else Rational(1, 10**6)) * abs(a)
        if wrong:
            raise UnreadableError("an equation that does not hold")


def _membership(left: Tokens, right: Tokens, sign: str, read: Read) -> Value:
    name = _name(left)
    values = read(right)
    if not isinstance(name, Symbol):
        if _names(left) and sign == r"\in":
            return Named(None, values)
        raise UnreadableError("a member that is no variable")
    if sign == r"\notin":
        excluded = as_set(values[0])
        if excluded is None:
            raise UnreadableError("not in what is no set of real numbers")
        return Region(name, sympy.Complement(sympy.S.Reals, excluded))
    found = as_set(values[0])
    return Region(name, found) if found is not None and not isinstance(found, sympy.FiniteSet) else Named(name, values)


def _inequality(sides: list[Tokens], signs: list[str]) -> Readings:
    formulas = [formula(each) for each in sides]
    relations = [_compared(*pair, sign) for pair, sign in zip(pairwise(formulas), signs, strict=True)]
    exact = all(each.exact for each in formulas)
    regions = [solutions(each) for each in relations]
    names = {each.variable for each in regions if each}
    if all(regions) and len(names) == 1:
        return (Region(names.pop(), sympy.Intersection(*(each.values for each in regions if each))),)
    if len(relations) == 1:
        return (relations[0],)
    middle = formulas[1].value
    if (
        len(relations) == 2
        and middle.is_Symbol
        and not any(each.value.has(middle) for each in (formulas[0], formulas[2]))
    ):
        up, down = set(signs) <= {"<", r"\le"}, set(signs) <= {">", r"\ge"}
        if up or down:  # with symbols as its ends
            ends = (formulas[0], formulas[2]) if up else (formulas[2], formulas[0])
            open_ends = [each in ("<", ">") for each in (signs if up else signs[::-1])]
            brackets = ("(" if open_ends[0] else "[") + (")" if open_ends[1] else "]")
            return (Named(middle, (Items(brackets, tuple((Formula(each.value, exact),) for each in ends)),)),)
    return (Items("", tuple((each,) for each in relations)),)


def _compared(left: Formula, right: Formula, sign: str) -> Relation:
    if isinstance(left.value, sympy.MatrixBase) or isinstance(right.value, sympy.MatrixBase):
        raise UnreadableError("an inequality of matrices")
    difference = left.value - right.value if sign in ("<", r"\le", r"\ne", "=") else right.value - left.value
    names = {"<": "<", ">": "<", r"\le": "<=", r"\ge": "<=", r"\ne": "!=", "=": "="}
    return Relation(names[sign], Formula(difference, left.exact and right.exact))


def has_sign(parts: Tokens) -> bool:
    """True if a relation stands outside of all brackets."""
    return bool(split(parts, SIGNS)[1])
