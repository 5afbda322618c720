"""Equality of SymPy expressions: exact if both are exact, within a tolerance if one has decimals."""

from __future__ import annotations

import random
from itertools import product

import sympy
from sympy import Add, Expr, MatrixBase, Rational, Symbol

from hybridflow.rewards.answers.formula import DEGREE, LOG_BASE, PERCENT
from hybridflow.rewards.answers.text import UnreadableError

_DIGITS = (60, 400)
"""Digits of evaluations of exact numbers. Unequal ones nearly always differ in the first."""
_POINTS = 12
_COUNTERS = frozenset("nkmjlpqrst")
type Tolerance = Rational | None
"""Largest difference of equal numbers, or, below 1, their largest relative difference. None if they are exact."""


class UndecidedError(Exception):
    """Two answers may be the same or not, depending on what was meant."""


def same(one: Expr, other: Expr, tolerance: Tolerance) -> bool:
    """True if two formulas are equal; those with variables at random points where both are defined.

    Raises:
        UndecidedError: it depends on the base of a logarithm, on degrees that stand for a number, or on the name of a
            constant.
    """
    bases = (1, sympy.log(10)) if one.has(LOG_BASE) or other.has(LOG_BASE) else (1,)
    verdicts = {_same(one.subs(LOG_BASE, base), other.subs(LOG_BASE, base), tolerance) for base in bases}
    if len(verdicts) > 1:
        raise UndecidedError("the base of a logarithm is not given")
    return verdicts.pop()


def _same(one: Expr, other: Expr, tolerance: Tolerance) -> bool:
    if one.has(PERCENT) != other.has(PERCENT):
        factors = (1, Rational(1, 100))
        return any(_same(one.subs(PERCENT, factor), other.subs(PERCENT, factor), tolerance) for factor in factors)
    if one.has(DEGREE) != other.has(DEGREE):
        if _equal(one.subs(DEGREE, 1), other.subs(DEGREE, 1), tolerance):
            return True
        if _equal(one.subs(DEGREE, sympy.pi / 180), other.subs(DEGREE, sympy.pi / 180), tolerance):
            raise UndecidedError("degrees of one answer are a number in the other")
        return False
    if _equal(one, other, tolerance):
        return True
    names, others = (side.free_symbols | side.atoms(sympy.core.numbers.ImaginaryUnit) for side in (one, other))
    for name, old in product(names - others, others - names):
        constants = all(str(symbol)[:1] in "CcKk" for symbol in (name, old)) or {name, old} == {sympy.I, Symbol("j")}
        if len(names ^ others) == 2 and constants and _equal(one, other.xreplace({old: name}), tolerance):
            raise UndecidedError("the answers only differ in the name of a constant")
    return False


def _equal(one: Expr, other: Expr, tolerance: Tolerance) -> bool:
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
    agreed = _agree(one, other, symbols, tolerance, integers=False)
    if agreed is None or (not agreed and (_counts(one) or _counts(other))):  # such as (-1)^n and cos(n pi)
        counting = all(str(symbol)[0] in _COUNTERS for symbol in symbols)
        agreed = counting and _agree(one, other, symbols, tolerance, integers=True)
    return agreed is True


def _opaque(value: Expr) -> Expr:
    """Put a symbol for each function without a meaning, such as f(x) and p => q."""
    applied = value.atoms(sympy.core.function.AppliedUndef)
    outer = {
        function for function in applied if not any(function != other and other.has(function) for other in applied)
    }
    return value.xreplace(
        {function: Symbol(str(function.func(*map(sympy.expand, function.args)))) for function in outer}
    )


def _equal_numbers(one: Expr, other: Expr, tolerance: Tolerance) -> bool:
    if tolerance is None:
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
        if 0 in (one, other):
            terms = Add.make_args(sympy.expand(one + other))
            return len(terms) > 1 and all(
                abs(_value(one + other, n)) <= Rational(1, 10 ** (n - 15)) * max(abs(_value(term, n)) for term in terms)
                for n in _DIGITS
            )
        return all(_close(_value(one, n), _value(other, n), Rational(1, 10 ** (n - 15))) for n in _DIGITS)
    a, b = _value(one, _DIGITS[0]), _value(other, _DIGITS[0])
    return bool(abs(a - b) <= tolerance * min(1, max(abs(a), abs(b))) * (1 + Rational(1, 10**9)))


def _value(number: Expr, digits: int) -> Expr:
    if number.is_Rational:
        return number
    evaluated = number.evalf(digits)
    if (
        not all(component.is_Float or component.is_Rational for component in evaluated.as_real_imag())
        or not evaluated.is_finite
    ):
        raise UnreadableError("a value that cannot be computed")
    return evaluated


def _close(one: Expr, other: Expr, share: Rational) -> bool:
    return bool(abs(one - other) <= share * max(abs(one), abs(other)))


def _agree(one: Expr, other: Expr, symbols: list[Symbol], tolerance: Tolerance, *, integers: bool) -> bool | None:
    """True if two formulas agree at all points where both are defined, and None without such a point.

    Rational functions are compared exactly, at points that unequal ones do not all share.
    """
    numbers = random.Random(0)
    exact = tolerance is None and one.is_rational_function(*symbols) and other.is_rational_function(*symbols)
    absolute = one.has(sympy.Abs) != other.has(sympy.Abs)
    compared = 0
    for index in range(_POINTS):
        point = {
            symbol: _coordinate(numbers, 40 if integers else 10**6 if exact else 4000, index) for symbol in symbols
        }
        defined = [exact or _defined(side, point) for side in (one, other)]
        if absolute and defined[0] != defined[1]:
            return False
        a, b = one.subs(point), other.subs(point)
        if not all(defined) or any(not side.is_number or not side.is_finite for side in (a, b)):
            continue
        if not (
            _equal_numbers(a, b, None) if exact else _close(a.evalf(30), b.evalf(30), tolerance or Rational(1, 10**20))
        ):
            return False
        compared += 1
        if exact and compared == 3:
            break
    return True if compared else None


def _counts(value: Expr) -> bool:
    """True if a formula is one of whole numbers: (-1)^n, a factorial, a sine of n pi, or one that rounds."""
    functions = value.atoms(
        sympy.factorial, sympy.binomial, sympy.sin, sympy.cos, sympy.floor, sympy.ceiling, sympy.Pow
    )
    return any(
        not function.is_Pow or (function.base.is_negative and function.exp.free_symbols) for function in functions
    )


def _coordinate(numbers: random.Random, largest: int, index: int) -> Expr:
    if largest == 40:
        return sympy.Integer(numbers.randint(1, largest))
    size = Rational(numbers.randint(1, largest), 1009)
    return (size, size * numbers.choice((1, -1)), size / 4)[index % 3]


def _defined(value: Expr, point: dict[Symbol, Expr]) -> bool:
    """True if what stands under its roots and logarithms is positive at a point; complex formulas are everywhere."""
    if value.has(sympy.I):
        return True
    under = [power.base for power in value.atoms(sympy.Pow) if not power.exp.is_integer]
    under += [logarithm.args[0] for logarithm in value.atoms(sympy.log)]
    return all(radicand.subs(point).is_nonnegative is not False for radicand in under if radicand.free_symbols)
