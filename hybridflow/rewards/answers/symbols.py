"""Names, signs and numbers of formulas, and their meaning in SymPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy import Expr, Rational, Symbol

from hybridflow.rewards.answers.text import UnreadableError, names

DEGREE, PERCENT, LOG_BASE = (
    Symbol("degree", positive=True),
    Symbol("percent", positive=True),
    Symbol("log base", positive=True),
)
"""Meanings that an answer leaves open: of a degree sign, a percent sign, and a logarithm without a base (its ln)."""

GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau upsilon phi chi psi"
    " omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar jmath partial nabla emptyset aleph"
    " vartheta varsigma varrho square Box top bot"
)
FONTS = names("mathbf boldsymbol bm mathit mathsf mathnormal pmb symbf")
ACCENTS = names("overline bar vec hat tilde dot ddot underline mathcal mathbb mathfrak mathscr arc overleftrightarrow")
FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    **{name: getattr(sympy, name) for name in names("sin cos tan cot sec csc sinh cosh tanh coth exp")},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in names("sin cos tan cot sec csc sinh cosh tanh")},
    **{"abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling, "Re": sympy.re, "Im": sympy.im, "arg": sympy.arg},
    **{"ln": sympy.log, "log": lambda x: sympy.log(x) / LOG_BASE, "lg": lambda x: sympy.log(x) / sympy.log(10)},
    "det": lambda x: x.det(),
}
ANGLES = names("sin cos tan cot sec csc")
SEVERAL: dict[str, Callable[..., Expr]] = {"max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm}
OPERATORS = (
    names("iff"),
    names("implies to mapsto"),
    names("lor oplus"),
    names("land"),
    names("parallel perp cong sim subset subseteq supset supseteq mid nmid simeq propto nparallel"),
    names("setminus circ otimes"),
    names("cup"),
    names("cap"),
)
"""Without arithmetic, those that bind least first."""
SYMMETRIC = names("iff lor land oplus parallel perp cong sim cup cap simeq nparallel")
APPLIED = "fghFGH"
"""Letters that are functions if a parenthesis follows."""
_MOST_BITS = 1_000_000
"""A larger number is not computed."""


@dataclass(frozen=True)
class Formula:
    """A formula, a number or a matrix. `exact` is False if it has decimals."""

    value: Expr
    exact: bool = True


def number(text: str) -> Expr:
    """A number exactly, also one with a period: 0.\\overline{3}."""
    if "\\" in text:
        decimals, _, repeated = text.replace("\\overset{.}", "\\dot").partition("\\")
        repeated = "".join(each for each in repeated if each.isdigit())
        places = len(decimals) - decimals.index(".") - 1
        fixed = Rational(decimals if decimals[-1] != "." else decimals + "0")
        return fixed + Rational(int(repeated), (10 ** len(repeated) - 1) * 10**places)
    return Rational(text)


def proper(top: Expr, bottom: Expr) -> Expr:
    if not 0 < top < bottom:
        raise UnreadableError(f"a mixed number with the fraction {top}/{bottom}")
    return top / bottom


def binomial(top: Expr, bottom: Expr) -> Expr:
    if top.is_number and bottom.is_number and (abs(top) > 50_000 or abs(bottom) > 50_000):
        raise UnreadableError("a binomial coefficient above 50,000")
    return sympy.binomial(top, bottom)


def power(base: Expr, exponent: Expr) -> Expr:
    """Raise, unless the result is too large to be computed. Raises UnreadableError."""
    if base.is_number and exponent.is_number and base.is_Rational and abs(base) != 1 and base != 0:
        bits = sympy.log(max(abs(base.p), base.q), 2).evalf(8) * abs(exponent).evalf(8)
        if not bits < _MOST_BITS:
            raise UnreadableError("a power that is too large")
    elif base.is_number and exponent.is_number and not abs(exponent.evalf(8)) < _MOST_BITS:
        raise UnreadableError("a power that is too large")
    return base**exponent


CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "imath": sympy.I}
KNOWN = {
    *(*CONSTANTS, *FUNCTIONS, *SEVERAL, *FONTS, *ACCENTS, *GREEK),
    *names("frac binom sqrt sum prod int lim angle triangle measuredangle"),
}
