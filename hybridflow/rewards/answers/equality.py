"""Equality of SymPy expressions: exactly where both are exact, in so many digits where one has decimals."""

from __future__ import annotations

import random
from collections.abc import Iterable

import sympy
from sympy import Expr, MatrixBase, Rational, Symbol

from hybridflow.rewards.answers.symbols import DEGREE, LOG_BASE, PERCENT, Formula
from hybridflow.rewards.answers.text import UnreadableError

_DIGITS = 60
"""Digits of a first evaluation of exact numbers, in which unequal ones nearly always differ."""
_ALL_DIGITS = 400
"""Digits of the second evaluation."""
_POINTS = 12
_COUNTERS = frozenset("nkmjlpqrst")


class UndecidedError(Exception):
    """Two answers may be the same or not, depending on what was meant."""


def same(right: Formula, given: Formula, digits: int) -> bool:
    """True if two formulas are equal.

    Exact ones are compared exactly. Others agree if they differ by at most 10^-digits, or, below 1, by that share of
    the right one. Formulas with variables are compared at random points where both are defined.

    Raises:
        UndecidedError: it depends on the base of a logarithm, on degrees that stand for a number, or on the name of a
            constant.
    """
    one, other = right.value, given.value
    tolerance = None if right.exact and given.exact else Rational(1, 10**digits)
    verdicts = {_same(*pair, tolerance) for pair in _without_logarithms(one, other)}
    if len(verdicts) > 1:
        raise UndecidedError("the base of a logarithm is not given")
    return verdicts.pop()


def _without_logarithms(one: Expr, other: Expr) -> Iterable[tuple[Expr, Expr]]:
    if not (one.has(LOG_BASE) or other.has(LOG_BASE)):
        return [(one, other)]
    return [(one.subs(LOG_BASE, base), other.subs(LOG_BASE, base)) for base in (1, sympy.log(10))]


def _same(one: Expr, other: Expr, tolerance: Rational | None) -> bool:
    for unit, likely, possible in ((PERCENT, (1, Rational(1, 100)), ()), (DEGREE, (1,), (sympy.pi / 180,))):
        if one.has(unit) != other.has(unit):
            for values, undecided in ((likely, False), (possible, True)):
                if any(_equal(one.subs(unit, value), other.subs(unit, value), tolerance) for value in values):
                    if undecided:
                        raise UndecidedError(f"a {unit} of one answer is a number in the other")
                    return True
            return False
    if _equal(one, other, tolerance):
        return True
    if (renamed := _renamed(one, other)) is not None and _equal(one, renamed, tolerance):
        raise UndecidedError("the answers only differ in the name of a constant")
    return False


def _renamed(one: Expr, other: Expr) -> Expr | None:
    """The second one with the first one's name of a constant of integration or of the imaginary unit."""
    mine, others = _names(one) - _names(other), _names(other) - _names(one)
    if len(mine) != 1 or len(others) != 1:
        return None
    old, new = others.pop(), mine.pop()
    units = {sympy.I, Symbol("j")}
    if {old, new} == units or all(str(each)[:1] in "CcKk" for each in (old, new)):
        return other.xreplace({old: new})
    return None


def _names(value: Expr) -> set[Expr]:
    return value.free_symbols | ({sympy.I} if value.has(sympy.I) else set())


def _equal(one: Expr, other: Expr, tolerance: Rational | None) -> bool:
    if isinstance(one, MatrixBase) or isinstance(other, MatrixBase):
        if not (isinstance(one, MatrixBase) and isinstance(other, MatrixBase)):
            return False
        return one.shape == other.shape and all(_equal(*pair, tolerance) for pair in zip(one, other, strict=True))
    if one == other:
        return True
    if one.is_infinite or other.is_infinite:
        return False
    one, other = _opaque(one), _opaque(other)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        return _equal_numbers(one, other, tolerance)
    if tolerance is None and one.is_rational_function(*symbols) and other.is_rational_function(*symbols):
        return _equal_rational_functions(one, other, symbols)
    return _equal_functions(one, other, symbols, tolerance)


def _opaque(value: Expr) -> Expr:
    """Put a symbol for each function without a meaning, such as f(x) and p => q."""
    applied = value.atoms(sympy.core.function.AppliedUndef)
    outer = {each for each in applied if not any(each != other and other.has(each) for other in applied)}
    return value.xreplace({each: Symbol(str(each.func(*map(sympy.expand, each.args)))) for each in outer})


def _equal_numbers(one: Expr, other: Expr, tolerance: Rational | None) -> bool:
    if tolerance is None:
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
        return all(
            _close(_value(one, n), _value(other, n), Rational(1, 10 ** (n - 15))) for n in (_DIGITS, _ALL_DIGITS)
        )
    a, b = _value(one, _DIGITS), _value(other, _DIGITS)
    size = max(abs(a), abs(b))
    scale = size if size < 1 else 1
    return bool(abs(a - b) <= tolerance * scale * (1 + Rational(1, 10**9)))


def _value(number: Expr, digits: int) -> Expr:
    if number.is_Rational:
        return number
    found = number.evalf(digits)
    if found.has(sympy.nan, sympy.zoo, sympy.oo) or not all(
        each.is_Float or each.is_Rational for each in found.as_real_imag()
    ):
        raise UnreadableError("a value that cannot be computed")
    return found


def _close(one: Expr, other: Expr, share: Rational) -> bool:
    return bool(abs(one - other) <= share * max(abs(one), abs(other)))


def _equal_rational_functions(one: Expr, other: Expr, symbols: list[Symbol]) -> bool:
    """Compare exactly at random points, which unequal ones do not all share."""
    numbers = random.Random(0)
    compared = 0
    for _ in range(_POINTS):
        point = {each: Rational(numbers.randint(-(10**6), 10**6), 1009) for each in symbols}
        a, b = one.subs(point), other.subs(point)
        if any(each.has(sympy.nan, sympy.zoo, sympy.oo) for each in (a, b)):
            continue
        if not _equal_numbers(a, b, None):
            return False
        compared += 1
        if compared == 3:
            return True
    return compared > 0


def _equal_functions(one: Expr, other: Expr, symbols: list[Symbol], tolerance: Rational | None) -> bool:
    """Compare at random points where both are defined, or only at whole ones if the variables count something."""
    share = tolerance or Rational(1, 10**20)
    agreed = _agree(one, other, symbols, share, whole=False)
    counting = all(str(each)[0] in _COUNTERS for each in symbols)
    if agreed is None or (not agreed and (_counts(one) or _counts(other))):  # such as (-1)^n and cos(n pi)
        agreed = counting and _agree(one, other, symbols, share, whole=True)
    return agreed is True


def _agree(one: Expr, other: Expr, symbols: list[Symbol], share: Rational, *, whole: bool) -> bool | None:
    """True if two formulas agree at all points where both are defined, and None without such a point."""
    numbers = random.Random(0)
    absolute = one.has(sympy.Abs) != other.has(sympy.Abs)
    compared = 0
    for index in range(_POINTS):
        point = {each: _coordinate(numbers, whole, index) for each in symbols}
        defined = [_defined(each, point) for each in (one, other)]
        if absolute and defined[0] != defined[1]:
            return False
        if not all(defined):
            continue
        a, b = one.subs(point), other.subs(point)
        if any(not each.is_number or each.has(sympy.nan, sympy.zoo, sympy.oo) for each in (a, b)):
            continue
        if not _close(a.evalf(30), b.evalf(30), share):
            return False
        compared += 1
    return True if compared else None


def _counts(value: Expr) -> bool:
    """True if a formula is one of whole numbers: (-1)^n, a factorial, a sine of n pi, or one that rounds."""
    found = value.atoms(sympy.factorial, sympy.binomial, sympy.sin, sympy.cos, sympy.floor, sympy.ceiling, sympy.Pow)
    return any(not each.is_Pow or (each.base.is_negative and each.exp.free_symbols) for each in found)


def _coordinate(numbers: random.Random, whole: bool, index: int) -> Expr:
    if whole:
        return sympy.Integer(numbers.randint(1, 40))
    size = Rational(numbers.randint(1, 4000), 1000)
    return size if index % 3 == 0 else size * numbers.choice((1, -1)) if index % 3 == 1 else size / 4


def _defined(value: Expr, point: dict[Symbol, Expr]) -> bool:
    """True if what stands under its roots and logarithms is positive at a point; complex formulas are everywhere."""
    if value.has(sympy.I):
        return True
    under = [each.base for each in value.atoms(sympy.Pow) if not each.exp.is_integer] + [
        each.args[0] for each in value.atoms(sympy.log)
    ]
    return all(each.subs(point).is_nonnegative is not False for each in under if each.free_symbols)
