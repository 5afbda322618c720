"""Equality of two answers, by their kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import sympy
from sympy import Expr

from hybridflow.rewards.answers import units
from hybridflow.rewards.answers.equality import UndecidedError, same
from hybridflow.rewards.answers.symbols import Formula
from hybridflow.rewards.answers.values import (
    Builder,
    Choice,
    Congruence,
    Dots,
    Either,
    Exact,
    Items,
    Named,
    Quantity,
    Ratio,
    Readings,
    Region,
    Relation,
    Value,
    Word,
)


def equal(right: Readings, given: Readings, digits: int) -> bool:
    """True if an answer is right whatever the right one means.

    Raises:
        UndecidedError: it is right in one meaning only.
    """
    for kind in (Word, Exact, Quantity):
        pairs = [[each for each in readings if isinstance(each, kind)] for readings in (right, given)]
        if any(_equal(one, other, digits) for one in pairs[0] for other in pairs[1]):
            return True
    exact = [{each.kind for each in readings if isinstance(each, Exact)} for readings in (right, given)]
    if exact[0] & exact[1]:  # a date is compared with a date
        return False
    if all(isinstance(each, Formula) and not each.value.free_symbols for each in right):
        given = (*given, *(each.total for each in given if isinstance(each, Relation) and each.total))
    if len(right) > 1 and not any(isinstance(each, Word) for each in given):
        right = tuple(each for each in right if not isinstance(each, Word))
    verdicts = set()
    undecided: UndecidedError | None = None
    for one in right:
        try:
            verdicts.add(any_decided(partial(_equal, one, digits=digits), given))
        except UndecidedError as error:
            undecided = error
    if undecided or len(verdicts) > 1:
        raise undecided or UndecidedError("the right answer can be read in two ways")
    return verdicts.pop()


def any_decided(check: Callable[[Any], bool], values: Sequence[Any]) -> bool:
    """True if a check holds for any value. Raises UndecidedError if it holds for none and was undecided for one."""
    undecided = None
    for each in values:
        try:
            if check(each):
                return True
        except UndecidedError as error:
            undecided = error
    if undecided:
        raise undecided
    return False


def _equal(one: Value, other: Value, digits: int) -> bool:
    for kind, compare in _COMPARISONS.items():
        if isinstance(one, kind):
            return compare(one, other, digits)
        if isinstance(other, kind):
            return compare(other, one, digits)
    raise TypeError(f"{type(one).__name__} and {type(other).__name__} cannot be compared")


def _either(one: Either, other: Value, digits: int) -> bool:
    return any_decided(lambda each: _equal(each, other, digits), one.values)


def _choice(one: Choice, other: Value, digits: int) -> bool:
    if isinstance(other, Choice):
        if one.letter != other.letter:
            return False
        return not (one.content and other.content) or equal(one.content, other.content, digits)
    if one.content:
        return equal(one.content, (other,), digits)
    return isinstance(other, Formula) and str(other.value) in (one.letter, one.letter.lower())


def _named(one: Named, other: Value, digits: int) -> bool:
    if isinstance(other, Named):
        names = {each for each in (one.name, other.name) if each is not None and each.is_Symbol}
        if (
            len(names) == 2 and _is_name(one.name, other.values) and _is_name(other.name, one.values)
        ):  # AB = CD, CD = AB
            return True
        plain = {str(each).partition("_")[0] for each in names}
        alike = len(names) < 2 or (len(plain) == 1 and plain & {str(each) for each in names})  # x_1 and x
        if alike and equal(one.values, other.values, digits):
            return True
        return bool(one.relation and other.relation) and _relation(one.relation, other.relation, digits)  # type: ignore[arg-type]
    if isinstance(other, Relation | Region) and one.relation:
        return _equal(one.relation, other, digits)
    if isinstance(other, Region) and None not in (one.name, other.variable) and one.name != other.variable:
        return False
    return equal(one.values, (other,), digits)


def _is_name(name: Expr | None, values: Readings) -> bool:
    return any(isinstance(each, Word) and each.text == str(name).casefold() for each in values)


def _relation(one: Relation, other: Value, digits: int) -> bool:
    """Equal up to a factor, which is positive for inequalities, or with the same solutions."""
    if isinstance(other, Region):
        found = solutions(one)
        return found is not None and _equal(found, other, digits)
    if not isinstance(other, Relation) or one.sign != other.sign:
        if isinstance(other, Items) and one.sign in ("<", "<="):
            return any_decided(lambda each: _items(each, other, digits), _half_lines(one))
        if isinstance(other, Items) and one.sign == "=" and (roots := _roots(one)):
            return _items(roots, other, digits)
        return False
    exact = one.difference.exact and other.difference.exact
    a, b = (sympy.expand(sympy.numer(sympy.together(each.difference.value))) for each in (one, other))
    if one.sign != "=":
        a, b = one.difference.value, other.difference.value
    quotient = sympy.cancel(a / b) if b != 0 else sympy.nan
    if quotient.is_number and quotient != 0:
        return bool(one.sign in ("=", "!=") or quotient.is_positive)
    if not exact and quotient.free_symbols:
        return _same_polynomials(a, b, one.sign in ("=", "!="), digits)
    if one.difference.value.free_symbols != other.difference.value.free_symbols:
        return False
    sets = [_roots(each) for each in (one, other)]
    return sets[0] is not None and sets[1] is not None and _items(sets[0], sets[1], digits)


def _same_polynomials(one: Expr, other: Expr, signed: bool, digits: int) -> bool:
    """True if two polynomials with decimals are equal up to a factor, which is positive unless `signed`."""
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not (one.is_polynomial(*symbols) and other.is_polynomial(*symbols)):
        return False
    terms = [dict(sympy.Poly(each, *symbols).terms()) for each in (one, other)]
    if terms[0].keys() != terms[1].keys():
        return False
    largest = max(terms[0], key=lambda each: abs(terms[0][each]))
    shares = [{key: Formula(value / each[largest], exact=False) for key, value in each.items()} for each in terms]
    return bool(signed or terms[0][largest] / terms[1][largest] > 0) and all(
        same(shares[0][each], shares[1][each], digits) for each in shares[0]
    )


def _roots(relation: Relation) -> Items | None:
    """The solutions of an equation in one variable."""
    symbols = relation.difference.value.free_symbols
    if relation.sign != "=" or len(symbols) != 1:
        return None
    symbol = symbols.pop()
    real = sympy.Dummy("x", real=True) if relation.difference.value.has(sympy.Abs) else symbol
    found = sympy.solve(relation.difference.value.subs(symbol, real), real)
    return Items("{}", tuple((Formula(each, relation.difference.exact),) for each in found)) if found else None


def _half_lines(relation: Relation) -> list[Items]:
    """An inequality as intervals of each of its variables, such as x > a as (a, oo)."""
    difference, closed = relation.difference, relation.sign == "<="
    found = []
    for symbol in difference.value.free_symbols:
        slope = difference.value.diff(symbol)
        bound = (
            (Formula(sympy.expand(symbol - difference.value / slope), difference.exact),) if slope in (1, -1) else ()
        )
        if slope == 1:
            found.append(Items("(]" if closed else "()", ((Formula(-sympy.oo),), bound)))
        elif slope == -1:
            found.append(Items("[)" if closed else "()", (bound, (Formula(sympy.oo),))))
    return found


def solutions(relation: Relation) -> Region | None:
    """The real solutions of a relation in one variable; None for others."""
    difference = relation.difference.value
    symbols = difference.free_symbols
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    real = sympy.Dummy("x", real=True)
    signs = {"=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le}
    found = signs[relation.sign](difference.subs(symbol, real), 0)
    if found in (sympy.true, sympy.false):
        return Region(symbol, sympy.S.Reals if found == sympy.true else sympy.S.EmptySet)
    values = (
        found.as_set()
        if relation.sign != "!="
        else sympy.Complement(sympy.S.Reals, sympy.solveset(difference.subs(symbol, real), real, sympy.S.Reals))
    )
    return Region(symbol, values)


def _region(one: Region, other: Value, digits: int) -> bool:
    if isinstance(other, Items):
        found = as_set(other)
        return found is not None and _same_sets(one.values, found, digits)
    if not isinstance(other, Region) or (None not in (one.variable, other.variable) and one.variable != other.variable):
        return False
    return _same_sets(one.values, other.values, digits)


def _same_sets(one: sympy.Set, other: sympy.Set, digits: int) -> bool:
    if one == other:
        return True
    parts = [sorted(each.args, key=_first) if isinstance(each, sympy.Union) else [each] for each in (one, other)]
    if len(parts[0]) == len(parts[1]) and all(_same_part(a, b, digits) for a, b in zip(*parts, strict=True)):
        return True
    difference = sympy.SymmetricDifference(one, other)
    return difference is sympy.S.EmptySet


def _first(part: sympy.Set) -> float:
    return float(part.inf) if part.inf.is_number else 0.0


def _same_part(one: sympy.Set, other: sympy.Set, digits: int) -> bool:
    if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
        ends = ((one.start, other.start), (one.end, other.end))
        return (one.left_open, one.right_open) == (other.left_open, other.right_open) and all(
            same(Formula(a, exact=False), Formula(b, exact=False), digits) if a.is_finite and b.is_finite else a == b
            for a, b in ends
        )
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet) and len(one) == len(other):
        pairs = zip(sorted(one.args, key=float), sorted(other.args, key=float), strict=True)
        return all(same(Formula(a), Formula(b), digits) for a, b in pairs)
    return bool(one == other)


def as_set(value: Value) -> sympy.Set | None:
    """An interval or a finite set of real numbers as a set; None for anything else."""
    if isinstance(value, Region):
        return value.values
    if isinstance(value, Named):
        return as_set(value.values[0])
    if not isinstance(value, Items):
        return None
    numbers = [each[0].value for each in value.items if isinstance(each[0], Formula)]
    if len(numbers) != len(value.items) or not all(each.is_extended_real for each in numbers):
        return None
    if value.brackets == "{}":
        return sympy.FiniteSet(*numbers)
    if value.brackets in ("()", "(]", "[)", "[]") and len(numbers) == 2:
        begin, end = numbers
        if sympy.Lt(begin, end) == sympy.true:
            return sympy.Interval(begin, end, value.brackets[0] == "(", value.brackets[1] == ")")
    return None


_VECTORS = ("()", "[]", "<>")


def _items(one: Items, other: Value, digits: int) -> bool:
    if isinstance(other, Formula) and isinstance(other.value, sympy.MatrixBase):
        rows = [
            Items(one.brackets, tuple((Formula(each, other.exact),) for each in row)) for row in other.value.tolist()
        ]
        if one.brackets not in _VECTORS:
            return False
        if all(isinstance(each[0], Items) for each in one.items):  # [[1, 2], [3, 4]]
            other = Items(one.brackets, tuple((each,) for each in rows))
        elif 1 in other.value.shape:
            other = Items("()", tuple(each for row in rows for each in row.items))
        else:
            return False
    if not isinstance(other, Items):
        return len(one.items) == 1 and one.brackets in ("", "{}") and equal(one.items[0], (other,), digits)
    for single, whole in ((one, other), (other, one)):  # {(1, 2)} and (1, 2)
        if len(single.items) == 1 and single.brackets in ("", "{}") and whole.brackets in ("()", "<>", "[]"):
            return equal(single.items[0], (whole,), digits)
    kinds = {one.brackets, other.brackets}
    ordered = bool(kinds & {"()", "(]", "[)", "[]", "<>"})
    vectors = {"()", "<>"} if len(one.items) == 2 else {"()", "<>", "[]"}
    if ordered and not (len(kinds) == 1 or kinds <= vectors | {""}):
        return False
    names = [[each[0].name for each in items.items if isinstance(each[0], Named)] for items in (one, other)]
    ordered = ordered or any(len(set(names[i])) > 1 and not names[1 - i] for i in (0, 1))  # x=1, y=2 and 1, 2
    if "{}" in kinds and not ordered:
        one, other = (Items("{}", _distinct(each.items, digits)) for each in (one, other))
    if len(one.items) != len(other.items):
        return False
    if ordered:
        found = all(equal(*pair, digits) for pair in zip(one.items, other.items, strict=True))
    else:
        found = matched(one.items, other.items, digits)
    if not found and len({str(each).partition("_")[0] for each in (*names[0], *names[1])}) == 1:
        values = [
            [each[0].values if isinstance(each[0], Named) else each for each in items.items] for items in (one, other)
        ]
        if matched(values[0], values[1], digits):
            raise UndecidedError("the values of x_1 and x_2 in another order, which are roots or two unknowns")
    return found


def _distinct(items: tuple[Readings, ...], digits: int) -> tuple[Readings, ...]:
    found: list[Readings] = []
    for item in items:
        if not any_decided(lambda each, item=item: equal(each, item, digits), found):  # type: ignore[misc]
            found.append(item)
    return tuple(found)


def matched(right: Sequence[Readings], given: Sequence[Readings], digits: int) -> bool:
    """True if each item of the right answer has one of its own in the given answer."""
    left = list(given)
    for one in right:
        for index, other in enumerate(left):
            if equal(one, other, digits):
                del left[index]
                break
        else:
            return False
    return True


def _dots(one: Dots, other: Value, digits: int) -> bool:
    if not isinstance(other, Dots):
        return False
    if len(one.items) == len(other.items):
        return all(equal(*pair, digits) for pair in zip(one.items, other.items, strict=True))
    summaries = [_progression(each) for each in (one, other)]
    if summaries[0] is None or summaries[1] is None:
        raise UndecidedError("two sequences with dots show different numbers of items")
    return len(summaries[0]) == len(summaries[1]) and all(
        same(a, b, digits) for a, b in zip(summaries[0], summaries[1], strict=True)
    )


def _progression(sequence: Dots) -> tuple[Formula, ...] | None:
    """The first item, the difference and, if there is one, the last item of an arithmetic progression."""
    items = [each[0] for each in sequence.items]
    at = next(index for index, each in enumerate(items) if isinstance(each, Word))
    shown = [each for each in items[:at] if isinstance(each, Formula)]
    steps = {sympy.expand(b.value - a.value) for a, b in pairwise(shown)}
    if len(shown) != at or len(steps) != 1 or len(items) - at > 2:
        return None
    last = [each for each in items[at + 1 :] if isinstance(each, Formula)]
    return (shown[0], Formula(steps.pop()), *last)


def _ratio(one: Ratio, other: Value, digits: int) -> bool:
    if isinstance(other, Formula) and len(one.parts) == 2:
        return same(Formula(one.parts[0].value / one.parts[1].value, one.parts[0].exact), other, digits)
    if not isinstance(other, Ratio) or len(one.parts) != len(other.parts):
        return False
    shares = [
        [Formula(each.value / parts[0].value, each.exact) for each in parts] for parts in (one.parts, other.parts)
    ]
    return all(same(a, b, digits) for a, b in zip(*shares, strict=True))


def _quantity(one: Quantity, other: Value, digits: int) -> bool:
    if isinstance(other, Formula):
        return not isinstance(other.value, sympy.MatrixBase) and same(one.number, other, digits)
    if not isinstance(other, Quantity):
        return False
    (factor, dimension), (factor2, dimension2) = (units.strip(each.unit) for each in (one, other))
    if dimension == dimension2:
        scaled = [Formula(n.number.value * f, n.number.exact) for n, f in ((one, factor), (other, factor2))]
        return same(scaled[0], scaled[1], digits)
    if 1 in (dimension, dimension2):
        return same(one.number, other.number, digits)
    labels = any(str(each).startswith("label") for each in dimension.free_symbols | dimension2.free_symbols)
    if labels and same(one.number, other.number, digits):
        raise UndecidedError("the same number of differently named things")
    return False


def _congruence(one: Congruence, other: Value, digits: int) -> bool:
    if not isinstance(other, Congruence) or not same(one.modulus, other.modulus, digits):
        return False
    if one.expression and other.expression and not same(one.expression, other.expression, digits):
        return False
    modulus = one.modulus.value
    sides = [{sympy.expand(each.value) % modulus for each in side.residues} for side in (one, other)]
    return sides[0] == sides[1]


def _builder(one: Builder, other: Value, digits: int) -> bool:
    if not isinstance(other, Builder):
        return False
    if len(one.conditions) == len(other.conditions) and matched(one.conditions, other.conditions, digits):
        return True
    raise UndecidedError("two sets have different conditions")


def _word(one: Word, other: Value, digits: int) -> bool:
    del digits
    return isinstance(other, Word) and one.text == other.text


def _exact(one: Exact, other: Value, digits: int) -> bool:
    del digits
    if not isinstance(other, Exact) or one.kind != other.kind:
        return False
    if one.kind == "based" and one.value != other.value and one.value[0] == other.value[0]:
        raise UndecidedError("the same number in two bases")
    if one.kind == "time":
        times = [(each.value[0] % 12, *each.value[1:3]) for each in (one, other)]
        if one.value[:3] != other.value[:3] and times[0] == times[1] and not (one.value[3] and other.value[3]):
            raise UndecidedError("a time of day without its half of the day")
        return bool(one.value[:3] == other.value[:3])
    return one == other


def _formula(one: Formula, other: Value, digits: int) -> bool:
    return isinstance(other, Formula) and same(one, other, digits)


_COMPARISONS: dict[type, Callable[[Any, Any, int], bool]] = {
    Either: _either,
    Choice: _choice,
    Named: _named,
    Relation: _relation,
    Region: _region,
    Dots: _dots,
    Items: _items,
    Builder: _builder,
    Congruence: _congruence,
    Exact: _exact,
    Ratio: _ratio,
    Quantity: _quantity,
    Word: _word,
    Formula: _formula,
}
"""Comparisons of a value of a kind with one of any kind that stands below it."""
