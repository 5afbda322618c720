"""Values of answers, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, Symbol

from hybridflow.rewards.answers.symbols import Formula

Readings = tuple["Value", ...]
"""Meanings of an answer whose notation leaves its meaning open."""


@dataclass(frozen=True)
class Word:
    """Words, a name or a code: equal whatever their case."""

    text: str


@dataclass(frozen=True)
class Exact:
    """A value of a kind that only equals itself: a date, a time of day, an ordinal, a number in another base."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Choice:
    """The letter of a choice, perhaps with its text."""

    letter: str
    content: Readings = ()


@dataclass(frozen=True)
class Quantity:
    """A number with a unit."""

    number: Formula
    unit: Expr


@dataclass(frozen=True)
class Items:
    """A list (`brackets` is empty), set, tuple, interval or vector."""

    brackets: str
    items: tuple[Readings, ...]


@dataclass(frozen=True)
class Dots:
    """A sequence that continues as it began; its items include the dots."""

    items: tuple[Readings, ...]


@dataclass(frozen=True)
class Ratio:
    """Numbers in proportion."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Region:
    """A set of real numbers, perhaps as the values of a variable."""

    variable: Symbol | None
    values: sympy.Set


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, as `difference` compared with zero by `sign`: =, <, <= or !=."""

    sign: str
    difference: Formula
    total: Formula | None = None
    """The number that several variables together are equal to, as in m + n = 11."""


@dataclass(frozen=True)
class Named:
    """A value with its name, as in x = 3 and f(x) = x^2."""

    name: Expr | None
    values: Readings
    relation: Relation | None = None


@dataclass(frozen=True)
class Congruence:
    """An expression's residues by a modulus."""

    expression: Formula | None
    residues: tuple[Formula, ...]
    modulus: Formula


@dataclass(frozen=True)
class Builder:
    """A set by its condition, whose variable has one name in all of them."""

    conditions: tuple[Readings, ...]


@dataclass(frozen=True)
class Either:
    """A value and its approximations."""

    values: Readings


Value = (
    Word
    | Exact
    | Choice
    | Formula
    | Quantity
    | Items
    | Dots
    | Ratio
    | Region
    | Relation
    | Named
    | Congruence
    | Builder
    | Either
)
