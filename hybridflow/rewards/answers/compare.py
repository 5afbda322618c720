"""Values of answers by kind, and their equality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pint
import sympy
from sympy import Basic, Expr, MatrixBase, Rational, Symbol

from hybridflow.rewards.answers.equality import Tolerance, UndecidedError, same
from hybridflow.rewards.answers.formula import DEGREE, PERCENT

Readings = tuple[Any, ...]
"""Meanings of an answer whose notation leaves its meaning open: values of the kinds below, and SymPy's formulas."""


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
    """A number with a unit or a label, such as apples."""

    number: Expr
    unit: pint.Unit
    label: str = ""


def factor(one: pint.Unit) -> Rational:
    """Return a unit in base units."""
    return Rational(*Fraction((1 * one).to_base_units().magnitude).as_integer_ratio())


@dataclass(frozen=True)
class Items:
    """Several values: in brackets, or between `brackets` that are empty for a list, : for a ratio, | for the conditions
    of a set, and ... for a sequence that continues as it began."""

    brackets: str
    items: tuple[Readings, ...]


@dataclass(frozen=True)
class Region:
    """A set of real numbers, perhaps as the values of a variable."""

    variable: Symbol | None
    values: sympy.Set


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, as `difference` compared with zero by `sign`: =, <, <= or !=."""

    sign: str
    difference: Expr
    total: Expr | None = None
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

    expression: Expr | None
    residues: tuple[Expr, ...]
    modulus: Expr


@dataclass(frozen=True)
class Either:
    """A number and its approximations."""

    values: Readings
    exact: Readings
    """Values that count in a given answer: the number, and the first approximation if it is rounded correctly."""


def exactly(readings: Readings) -> Readings:
    """Return a given answer without its approximations, which would make it several answers."""
    exact: list[Any] = []
    for reading in readings:
        if isinstance(reading, Either):
            exact.extend(reading.exact)
        elif isinstance(reading, Items):
            exact.append(replace(reading, items=tuple(map(exactly, reading.items))))
        elif isinstance(reading, Named):
            exact.append(replace(reading, values=exactly(reading.values)))
        elif isinstance(reading, Choice):
            exact.append(replace(reading, content=exactly(reading.content)))
        else:
            exact.append(reading)
    return tuple(exact)


DOTS = Word("...")


def equal(right: Readings, given: Readings, tolerance: Tolerance) -> bool:
    """True if an answer is right whatever the right one means.

    Raises:
        UndecidedError: it is right in one meaning only.
    """
    for kind in (Word, Exact, Quantity):
        pairs = [[reading for reading in readings if isinstance(reading, kind)] for readings in (right, given)]
        if any(_equal(one, other, tolerance) for one in pairs[0] for other in pairs[1]):
            return True
    exact = [{reading.kind for reading in readings if isinstance(reading, Exact)} for readings in (right, given)]
    if exact[0] & exact[1]:  # a date is compared with a date
        return False
    if all(isinstance(reading, Basic) and not reading.free_symbols for reading in right):
        given = (
            *given,
            *(reading.total for reading in given if isinstance(reading, Relation) and reading.total is not None),
        )
    if len(right) > 1 and not any(isinstance(reading, Word) for reading in given):
        right = tuple(reading for reading in right if not isinstance(reading, Word))
    verdicts = set()
    undecided: UndecidedError | None = None
    for one in right:
        try:
            verdicts.add(any_decided(partial(_equal, one, tolerance=tolerance), given))
        except UndecidedError as error:
            undecided = error
    if undecided or len(verdicts) > 1:
        raise undecided or UndecidedError("the right answer can be read in two ways")
    return verdicts.pop()


def any_decided(check: Callable[[Any], bool], values: Sequence[Any]) -> bool:
    """True if a check holds for any value. Raises UndecidedError if it holds for none and was undecided for one."""
    undecided = None
    for value in values:
        try:
            if check(value):
                return True
        except UndecidedError as error:
            undecided = error
    if undecided:
        raise undecided
    return False


def _equal(one: Any, other: Any, tolerance: Tolerance) -> bool:
    for kind, compare in _COMPARISONS.items():
        if isinstance(one, kind):
            return compare(one, other, tolerance)
        if isinstance(other, kind):
            return compare(other, one, tolerance)
    raise TypeError(f"{type(one).__name__} and {type(other).__name__} cannot be compared")


def _choice(one: Choice, other: Any, tolerance: Tolerance) -> bool:
    if isinstance(other, Choice):
        if one.letter != other.letter:
            return False
        return not (one.content and other.content) or equal(one.content, other.content, tolerance)
    if one.content:
        return equal(one.content, (other,), tolerance)
    return isinstance(other, Basic) and str(other) in (one.letter, one.letter.lower())


def _named(one: Named, other: Any, tolerance: Tolerance) -> bool:
    if isinstance(other, Named):
        names = {name for name in (one.name, other.name) if name is not None and name.is_Symbol}
        words = [(Word(str(left.name).casefold()), right.values) for left, right in ((one, other), (other, one))]
        if len(names) == 2 and all(word in values for word, values in words):  # AB = CD, CD = AB
            return True
        plain = {str(name).partition("_")[0] for name in names}
        alike = len(names) < 2 or (len(plain) == 1 and plain & {str(name) for name in names})  # x_1 and x
        if alike and equal(one.values, other.values, tolerance):
            return True
        return (
            one.relation is not None and other.relation is not None and _equal(one.relation, other.relation, tolerance)
        )
    if isinstance(other, Relation | Region) and one.relation:
        return _equal(one.relation, other, tolerance)
    if isinstance(other, Region) and None not in (one.name, other.variable) and one.name != other.variable:
        return False
    return equal(one.values, (other,), tolerance)


def _relation(one: Relation, other: Any, tolerance: Tolerance) -> bool:
    """Equal up to a factor, which is positive for inequalities, or with the same solutions."""
    if not isinstance(other, Relation) or one.sign != other.sign:
        if isinstance(other, Items) and one.sign in ("<", "<="):
            return any_decided(lambda half_line: _items(half_line, other, tolerance), _half_lines(one))
        if isinstance(other, Items) and one.sign == "=" and (roots := _roots(one)):
            return _items(roots, other, tolerance)
        return False
    a, b = (
        sympy.expand(sympy.numer(sympy.together(difference)) if one.sign == "=" else difference)
        for difference in (one.difference, other.difference)
    )
    if a == 0 or b == 0:  # an identity, which says nothing
        return bool(a == b)
    quotient = sympy.cancel(a / b)
    if quotient.is_number and quotient.is_finite and quotient != 0:
        return bool(one.sign in ("=", "!=") or quotient.is_positive)
    if tolerance is not None and quotient.free_symbols:
        return _same_polynomials(a, b, one.sign in ("=", "!="), tolerance)
    if one.difference.free_symbols != other.difference.free_symbols:
        return False
    mine, others = _roots(one), _roots(other)
    return mine is not None and others is not None and _items(mine, others, tolerance)


def _same_polynomials(one: Expr, other: Expr, signed: bool, tolerance: Tolerance) -> bool:
    """True if two polynomials with decimals are equal up to a factor, which is positive unless `signed`."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not (one.is_polynomial(*symbols) and other.is_polynomial(*symbols)):
        return False
    terms = [dict(sympy.Poly(polynomial, *symbols).terms()) for polynomial in (one, other)]
    if terms[0].keys() != terms[1].keys():
        return False
    largest = max(terms[0], key=lambda monomial: abs(terms[0][monomial]))
    shares = [{key: value / coefficients[largest] for key, value in coefficients.items()} for coefficients in terms]
    return bool(signed or terms[0][largest] / terms[1][largest] > 0) and all(
        same(shares[0][monomial], shares[1][monomial], tolerance) for monomial in shares[0]
    )


def _roots(relation: Relation) -> Items | None:
    """The solutions of an equation in one variable."""
    symbols = relation.difference.free_symbols
    if relation.sign != "=" or len(symbols) != 1:
        return None
    symbol = symbols.pop()
    real = sympy.Dummy("x", real=True) if relation.difference.has(sympy.Abs) else symbol
    roots = sympy.solve(relation.difference.subs(symbol, real), real)
    return Items("{}", tuple((root,) for root in roots)) if roots else None


def _half_lines(relation: Relation) -> list[Items]:
    """An inequality as intervals of each of its variables, such as x > a as (a, oo)."""
    intervals = []
    for symbol in relation.difference.free_symbols:
        slope = relation.difference.diff(symbol)
        if slope in (1, -1):
            bound = sympy.expand(symbol - relation.difference / slope)
            ends = ((-sympy.oo,), (bound,)) if slope == 1 else ((bound,), (sympy.oo,))
            closed = {"<": "()", "<=": "(]" if slope == 1 else "[)"}[relation.sign]
            intervals.append(Items(closed, ends))
    return intervals


_SIGNS = {"=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le}


def solutions(relation: Relation) -> Region | None:
    """The real solutions of a relation in one variable; None for others."""
    difference = relation.difference
    if len(difference.free_symbols) != 1:
        return None
    (symbol,) = difference.free_symbols
    real = sympy.Dummy("x", real=True)
    condition = _SIGNS[relation.sign](difference.subs(symbol, real), 0)
    if condition in (sympy.true, sympy.false):
        return Region(symbol, sympy.S.Reals if condition == sympy.true else sympy.S.EmptySet)
    return Region(symbol, condition.as_set())


def _region(one: Region, other: Any, tolerance: Tolerance) -> bool:
    if isinstance(other, Items):
        members = as_set(other)
        return members is not None and _same_sets(one.values, members, tolerance)
    if not isinstance(other, Region) or (None not in (one.variable, other.variable) and one.variable != other.variable):
        return False
    return _same_sets(one.values, other.values, tolerance)


def _same_sets(one: sympy.Set, other: sympy.Set, tolerance: Tolerance) -> bool:
    if one == other:
        return True
    subsets = [
        sorted(union.args, key=lambda subset: subset.inf) if union.is_Union else [union] for union in (one, other)
    ]
    if len(subsets[0]) == len(subsets[1]) and all(_same_subset(a, b, tolerance) for a, b in zip(*subsets, strict=True)):
        return True
    return sympy.SymmetricDifference(one, other) is sympy.S.EmptySet


def _same_subset(one: sympy.Set, other: sympy.Set, tolerance: Tolerance) -> bool:
    if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
        ends = ((one.start, other.start), (one.end, other.end))
        return (one.left_open, one.right_open) == (other.left_open, other.right_open) and all(
            same(a, b, tolerance) for a, b in ends
        )
    return bool(one == other)


def as_set(value: Any) -> sympy.Set | None:
    """An interval or a finite set of real numbers as a set; None for anything else."""
    if isinstance(value, Region):
        return value.values
    if not isinstance(value, Items):
        return None
    numbers = [item[0] for item in value.items]
    if not all(isinstance(number, Expr) and number.is_extended_real for number in numbers):
        return None
    if value.brackets == "{}":
        return sympy.FiniteSet(*numbers)
    if value.brackets in ORDERED and len(numbers) == 2:
        begin, end = numbers
        if sympy.Lt(begin, end) == sympy.true:
            return sympy.Interval(begin, end, value.brackets[0] == "(", value.brackets[1] == ")")
    return None


_VECTORS = ("()", "[]", "<>")
ORDERED = (*_VECTORS, "(]", "[)")
"""Brackets of tuples, vectors and intervals."""


def _items(one: Items, other: Any, tolerance: Tolerance) -> bool:
    marks = {side.brackets for side in (one, other) if isinstance(side, Items)}
    if one.brackets == ":" and len(one.items) == 2 and isinstance(other, Expr):
        return same(one.items[0][0] / one.items[1][0], other, tolerance)
    if marks & _SPECIAL.keys():
        return isinstance(other, Items) and len(marks) == 1 and _SPECIAL[one.brackets](one, other, tolerance)
    if isinstance(other, MatrixBase):
        if one.brackets not in _VECTORS:
            return False
        if all(isinstance(item[0], Items) for item in one.items):  # [[1, 2], [3, 4]]
            rows = (tuple((entry,) for entry in row) for row in other.tolist())
            other = Items(one.brackets, tuple((Items(one.brackets, row),) for row in rows))
        elif 1 in other.shape:
            other = Items("()", tuple((entry,) for entry in other))
        else:
            return False
    if not isinstance(other, Items):
        return len(one.items) == 1 and one.brackets in ("", "{}") and equal(one.items[0], (other,), tolerance)
    for single, vector in ((one, other), (other, one)):  # {(1, 2)} and (1, 2)
        if len(single.items) == 1 and single.brackets in ("", "{}") and vector.brackets in _VECTORS:
            return equal(single.items[0], (vector,), tolerance)
    kinds = {one.brackets, other.brackets}
    ordered = not kinds.isdisjoint(ORDERED)
    vectors = {"()", "<>"} if len(one.items) == 2 else {"()", "<>", "[]"}
    if ordered and not (len(kinds) == 1 or kinds <= vectors | {""}):
        return False
    names = [[item[0].name for item in items.items if isinstance(item[0], Named)] for items in (one, other)]
    ordered = ordered or any(len(set(names[i])) > 1 and not names[1 - i] for i in (0, 1))  # x=1, y=2 and 1, 2
    if "{}" in kinds and not ordered:
        one, other = (Items("{}", _distinct(side.items, tolerance)) for side in (one, other))
    if len(one.items) != len(other.items):
        return False
    agreed = (_in_order if ordered else _matched)(one.items, other.items, tolerance)
    if not agreed and len({str(name).partition("_")[0] for name in (*names[0], *names[1])}) == 1:
        values = [
            [item[0].values if isinstance(item[0], Named) else item for item in items.items] for items in (one, other)
        ]
        if _matched(values[0], values[1], tolerance):
            raise UndecidedError("the values of x_1 and x_2 in another order, which are roots or two unknowns")
    return agreed


def _distinct(items: tuple[Readings, ...], tolerance: Tolerance) -> tuple[Readings, ...]:
    distinct: list[Readings] = []
    for item in items:
        if not any_decided(partial(equal, item, tolerance=tolerance), distinct):
            distinct.append(item)
    return tuple(distinct)


def _in_order(right: Sequence[Readings], given: Sequence[Readings], tolerance: Tolerance) -> bool:
    return len(right) == len(given) and all(equal(*pair, tolerance) for pair in zip(right, given, strict=True))


def _matched(right: Sequence[Readings], given: Sequence[Readings], tolerance: Tolerance) -> bool:
    """True if each item of the right answer has one of its own in the given answer."""
    left = list(given)
    for one in right:
        index = next((at for at, other in enumerate(left) if equal(one, other, tolerance)), None)
        if index is None:
            return False
        del left[index]
    return True


_FEWEST_ITEMS = 3
"""Items of a sequence with dots that may be continued in one way."""


def _dots(one: Items, other: Items, tolerance: Tolerance) -> bool:
    if len(one.items) == len(other.items):
        return _in_order(one.items, other.items, tolerance)
    summaries = [_progression(side) for side in (one, other)]
    if summaries[0] is None or summaries[1] is None:
        begins = [side.items[: side.items.index((DOTS,))] for side in (one, other)]
        shown = min(map(len, begins))
        if shown < _FEWEST_ITEMS or not _in_order(begins[0][:shown], begins[1][:shown], tolerance):
            return False
        raise UndecidedError("two sequences with dots show different numbers of items")
    return _in_order(summaries[0], summaries[1], tolerance)


def _progression(sequence: Items) -> list[Readings] | None:
    """The first item, the difference and, if there is one, the last item of an arithmetic progression."""
    items = [item[0] for item in sequence.items]
    at = items.index(DOTS)
    shown, last = items[:at], items[at + 1 :]
    if not all(isinstance(term, Expr) for term in shown):
        return None
    steps = {sympy.expand(b - a) for a, b in pairwise(shown)}
    return [(term,) for term in (shown[0], *steps, *last)] if len(steps) == 1 and len(last) < 2 else None


def _ratio(one: Items, other: Items, tolerance: Tolerance) -> bool:
    terms = [[item[0] for item in ratio.items] for ratio in (one, other)]
    mine, others = ([(term / next(filter(None, side), 1),) for term in side] for side in terms)
    return _in_order(mine, others, tolerance)


def _builder(one: Items, other: Items, tolerance: Tolerance) -> bool:
    if len(one.items) == len(other.items) and _matched(one.items, other.items, tolerance):
        return True
    if not equal(one.items[0], other.items[0], tolerance) or _symbols(one.items[1:]) != _symbols(other.items[1:]):
        return False
    raise UndecidedError("two sets have different conditions")


def _symbols(value: Any) -> set[Basic]:
    """Symbols of a value of any kind, or of several."""
    if isinstance(value, Basic | MatrixBase):
        return set(value.free_symbols)
    members = value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else ()
    return set().union(*map(_symbols, members))


_SPECIAL = {"...": _dots, ":": _ratio, "|": _builder}


def _quantity(one: Quantity, other: Any, tolerance: Tolerance) -> bool:
    if isinstance(other, Expr):
        signs = other.atoms(Symbol) & {DEGREE, PERCENT} - one.number.atoms(Symbol)
        if signs == {DEGREE} and one.unit.dimensionless and not one.label:  # an angle
            return same(one.number * factor(one.unit), other.subs(DEGREE, sympy.pi / 180), tolerance)
        if signs and not one.unit.is_compatible_with("kelvin") and not str(one.unit).startswith("temperature"):
            return False
        return same(one.number, other, tolerance)
    if not isinstance(other, Quantity):
        return False
    if one.unit.dimensionality != other.unit.dimensionality:
        return False
    if not (one.label and other.label) and one.label != other.label and one.unit.dimensionless:  # apples and bits
        return False
    if not same(one.number * factor(one.unit), other.number * factor(other.unit), tolerance):
        return False
    if one.label and other.label and one.label != other.label:
        raise UndecidedError("the same number of differently named things")
    return True


def _congruence(one: Congruence, other: Any, tolerance: Tolerance) -> bool:
    if not isinstance(other, Congruence) or not same(one.modulus, other.modulus, tolerance):
        return False
    if one.expression and other.expression and not same(one.expression, other.expression, tolerance):
        return False
    sides = [{sympy.expand(residue) % one.modulus for residue in side.residues} for side in (one, other)]
    return sides[0] == sides[1]


def _exact(one: Exact, other: Any, tolerance: Tolerance) -> bool:
    del tolerance
    if not isinstance(other, Exact) or one.kind != other.kind:
        return False
    if one.kind == "based" and one.value != other.value and one.value[0] == other.value[0]:
        raise UndecidedError("the same number in two bases")
    if one.kind == "time" and not (one.value[-1] and other.value[-1]):
        times = [(side.value[0] % 12, *side.value[1:3]) for side in (one, other)]
        if one.value[:3] != other.value[:3] and times[0] == times[1]:
            raise UndecidedError("a time of day without its half of the day")
        return bool(one.value[:3] == other.value[:3])
    return one == other


_COMPARISONS: dict[type, Callable[[Any, Any, Tolerance], bool]] = {
    Either: lambda one, other, tolerance: any_decided(lambda reading: _equal(reading, other, tolerance), one.values),
    Choice: _choice,
    Named: _named,
    Relation: _relation,
    Region: _region,
    Items: _items,
    Congruence: _congruence,
    Exact: _exact,
    Quantity: _quantity,
    Word: lambda one, other, tolerance: one == other,
    Basic: lambda one, other, tolerance: isinstance(other, Basic) and same(one, other, tolerance),
}
"""Comparisons of a value of a kind with one of any kind that stands below it."""
