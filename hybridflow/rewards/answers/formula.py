"""Formulas as SymPy expressions, by the grammar formula.lark, which reads a formula completely or refuses it.

Nothing is dropped: accents are part of a symbol's name, and operators without arithmetic, such as those of logic and
geometry, are functions that only equal themselves. The grammar that SymPy has for Lark is parsed by Earley's algorithm:
it takes 125 ms a formula of tests/hybridflow/rewards/answers.txt where this one takes 2 ms, and refuses one in six.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import lark
import sympy
from lark.common import LexerConf
from lark.lexer import ContextualLexer
from sympy import Expr, Integer, Rational, Symbol

from hybridflow.rewards.answers.text import FUNCTIONS as NAMES
from hybridflow.rewards.answers.text import UnreadableError

DEGREE, PERCENT, LOG_BASE = (Symbol(name, positive=True) for name in ("degree", "percent", "log base"))
"""Meanings that an answer leaves open: of a degree sign, a percent sign, and a logarithm without a base (its ln)."""


class _Lexer(ContextualLexer):
    """Lexer without the validation of terminals: with interegular installed it takes half of this module's import."""

    def __init__(self, conf: LexerConf, *args: Any, **kwargs: Any) -> None:
        conf.skip_validation = True
        super().__init__(conf, *args, **kwargs)


_GRAMMAR = lark.Lark(
    Path(__file__).with_name("formula.lark").read_text(), parser="lalr", _plugins={"ContextualLexer": _Lexer}
)
_MOST_NESTED = 8
_MOST_BITS = 1_000_000
"""A larger number is not computed."""
_MOST = 50_000
"""Argument of a factorial or a binomial coefficient."""
_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS: dict[str, Callable[[Expr], Expr]] = {
    **{name: getattr(sympy, name) for name in (*_ANGLES, "sinh", "cosh", "tanh", "coth", "exp", "floor")},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in (*_ANGLES, "sinh", "cosh", "tanh")},
    **{"abs": sympy.Abs, "ceil": sympy.ceiling, "Re": sympy.re, "Im": sympy.im, "arg": sympy.arg},
    **{"ln": sympy.log, "log": lambda x: sympy.log(x) / LOG_BASE, "lg": lambda x: sympy.log(x) / sympy.log(10)},
    "det": lambda x: x.det() if isinstance(x, sympy.MatrixBase) else sympy.Function("det")(x),
}
_SEVERAL = {"max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm}
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "imath": sympy.I}
_SYMMETRIC = re.compile("iff|lor|land|oplus|parallel|perp|cong|sim|cup|cap|simeq|nparallel")

_NAME = re.compile(rf"(?<![\\A-Za-z])(?:\\text\{{ ?({NAMES}) ?\}}|({NAMES})(?![A-Za-z]))")
_TEXT = re.compile(r"\\text\{ ?(\d+(?:\.\d+)?|[A-Za-z]|%) ?\}")
_GAP = re.compile(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])")
_ARGUMENT = re.compile(
    r"(\\(?:(?:frac|binom)(?:\{(?:[^{}]|\{[^{}]*\})*\})?|sqrt(?:\[[^\[\]]*\])?|vec|hat|bar|overline|tilde|dot|math(?:bb|cal)))"
    r" ?(\d|[A-Za-z](?![A-Za-z])|(?<= )[A-Za-z]|(?<=[\d}\]])[A-Za-z]|\\[a-z]+)"
)
_DIFFERENTIAL = re.compile(r"(?<!\\)d ?(\\theta|[A-Za-z])(?![A-Za-z])")
_BARS = (  # those of a pair stand around what neither begins with a bar nor ends with an operator
    (re.compile(r"\\\|([^|]*[^|+\-*/=^_(,<>{])\\\|"), r"\\lVert \1\\rVert "),
    (re.compile(r"(?<!\\)\|([^|]*[^|+\-*/=^_(,<>{])\|"), r"\\lvert \1\\rvert "),
)


def prepare(text: str) -> str:
    """Write a formula as the grammar has it: arguments in braces, bars that open or close, no needless white space."""
    text = _NAME.sub(lambda match: rf"\{match[1] or match[2]} ", _TEXT.sub(r" \1", text))
    text = _GAP.sub("", re.sub(r"\s+", " ", text))
    if r"\int" in text:
        text = _DIFFERENTIAL.sub(r"\\diff\1", text)
    for pattern, notation in ((_ARGUMENT, r"\1{\2}"), *_BARS):
        for _ in range(_MOST_NESTED):
            text, changes = pattern.subn(notation, text)
            if not changes:
                break
    return text


@lru_cache(maxsize=1024)
def formulas(text: str) -> tuple[Expr, ...]:
    """Read a formula; a/bc has two readings, (a/b)c and a/(bc). Raises UnreadableError."""
    if not text:
        raise UnreadableError("an empty formula")
    prepared = prepare(text)
    try:
        tree = _GRAMMAR.parse(prepared)
        values = [_value(tree, prepared, tight) for tight in ((False, True) if "/" in text else (False,))]
    except lark.exceptions.UnexpectedInput as error:
        rest = re.findall(r"\\[A-Za-z]+|.|$", prepared[error.pos_in_stream or 0 :])
        raise UnreadableError(f"{rest[0] or 'what ends so'} cannot be read in {text[:100]!r}") from None
    except Exception as error:  # of SymPy
        inner = getattr(error, "orig_exc", error)
        if isinstance(inner, UnreadableError):
            raise inner from None
        raise UnreadableError(f"{text[:100]!r} cannot be computed: {type(inner).__name__}: {inner}") from None
    return tuple(dict.fromkeys(values))


def formula(text: str) -> Expr:
    """Read a formula in its first meaning. Raises UnreadableError."""
    return formulas(text)[0]


def _value(tree: Any, text: str, tight: bool) -> Expr:
    value = _Values(tight).transform(tree)
    if value.atoms(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative):
        value = value.doit()
    imaginary = Symbol("i")
    if imaginary in value.free_symbols and Symbol("j") not in value.free_symbols and not re.search(r"_\{?i", text):
        value = value.subs(imaginary, sympy.I)
    if value.has(sympy.nan, sympy.zoo):
        raise UnreadableError("a value that is not defined")
    return value


@lark.v_args(inline=True)
class _Values(lark.Transformer[Any, Expr]):
    """Values of the grammar's rules."""

    def __init__(self, tight: bool) -> None:
        super().__init__()
        self._tight = tight

    add = staticmethod(lambda one, other: one + other)
    subtract = staticmethod(lambda one, other: one - other)
    multiply = staticmethod(lambda one, other: one * other)
    modulo = staticmethod(lambda one, other: sympy.Mod(one, other))
    negative = staticmethod(lambda value: -value)
    negation = staticmethod(lambda value: sympy.Function("neg")(value))
    percent = staticmethod(lambda value: value * PERCENT)
    degrees = staticmethod(lambda value: value * DEGREE)
    absolute = staticmethod(sympy.Abs)
    norm = staticmethod(lambda value: sympy.Function("norm")(value))
    floor = staticmethod(sympy.floor)
    ceiling = staticmethod(sympy.ceiling)
    items = row = staticmethod(lambda *values: list(values))
    constant = staticmethod(lambda name: _CONSTANTS[name[1:]])
    several = staticmethod(lambda name, values: _SEVERAL[name[1:]](*values))
    applied = staticmethod(lambda name, values: sympy.Function(re.sub(r"[{} ]|\\prime", "", name))(*values))
    derivative = staticmethod(lambda mark, value: sympy.Derivative(value, Symbol(mark[-2])))
    script = staticmethod(lambda mark, value: (str(mark), value))

    def operation(self, one: Expr, mark: str, other: Expr) -> Expr:
        function = sympy.Function(mark[1:])
        terms = [one, other]
        if _SYMMETRIC.fullmatch(mark[1:]):  # associative too, as far as answers go
            terms = [operand for term in terms for operand in (term.args if term.func == function else [term])]
            terms.sort(key=sympy.default_sort_key)
        return function(*terms)

    def divide(self, top: Expr, bottom: Expr, *others: Expr) -> Expr:
        rest = sympy.prod(others, Integer(1)) if others else Integer(1)
        if self._tight and not bottom.is_Number:
            return self.fraction(top, bottom * rest)
        return self.fraction(top, bottom) * rest

    def fraction(self, top: Expr, bottom: Expr) -> Expr:
        if bottom.is_zero is True:
            raise UnreadableError("a division by zero")
        return top / bottom

    def factorial(self, base: Expr) -> Expr:
        if base.is_number and (not base.is_Integer or not 0 <= base <= _MOST):
            raise UnreadableError(f"a factorial of another than a whole number up to {_MOST:,}")
        return sympy.factorial(base)

    def binomial(self, top: Expr, bottom: Expr) -> Expr:
        if top.is_number and bottom.is_number and (abs(top) > _MOST or abs(bottom) > _MOST):
            raise UnreadableError(f"a binomial coefficient above {_MOST:,}")
        return sympy.binomial(top, bottom)

    def transposed(self, base: Expr) -> Expr:
        return base.T if isinstance(base, sympy.MatrixBase) else base ** Symbol("T")

    def raised(self, base: Expr, exponent: Expr) -> Expr:
        """Raise, unless the result is too large to be computed."""
        if base.is_number and exponent.is_number:
            bits = sympy.log(max(abs(base.p), base.q), 2).evalf(8) if base.is_Rational and base != 0 else 1
            if not abs(bits * exponent.evalf(8)) < _MOST_BITS:
                raise UnreadableError("a power that is too large")
        return base**exponent

    def root(self, *values: Expr) -> Expr:
        degree, radicand = values if len(values) == 2 else (Integer(2), values[0])
        if degree.is_odd and radicand.is_negative:
            return -self.raised(-radicand, 1 / degree)
        return self.raised(radicand, 1 / degree)

    def number(self, token: lark.Token) -> Expr:
        text = str(token)
        if token.type == "MIXED":
            integer, top, bottom = map(Integer, re.findall(r"\d+", text))
            if not 0 < top < bottom:
                raise UnreadableError(f"a mixed number with the fraction {top}/{bottom}")
            return integer + Rational(top, bottom)
        if token.type == "REPEATING":
            fixed, _, repeated = text.partition("\\")
            repeated = re.sub(r"\D", "", repeated)
            decimals = len(fixed) - fixed.index(".") - 1
            return Rational(f"{fixed}0") + Rational(int(repeated), (10 ** len(repeated) - 1) * 10**decimals)
        return Rational(text)

    def symbol(self, token: lark.Token, *marks: lark.Token) -> Expr:
        """A variable, whose name has its subscript and primes."""
        name = re.sub(r"\\text|[{} ]", "", token)
        if token.type == "ACCENTED":
            if re.fullmatch(r"\\hat[ijk]", name):
                name = name[-1]
        elif token.type == "ANGLE":
            letters = name.lstrip("\\abcdefghijklmnopqrstuvwxyz")
            if not name.startswith(r"\triangle"):
                name = name.removesuffix(letters) + min(letters, letters[::-1])
        for mark in marks:
            if mark.type == "SUBSCRIPT":
                name += re.sub(r"\\text|[{} ]", "", mark)
            else:
                name += "'" * len(re.findall(r"'|prime", mark))
        return sympy.E if name == "e" else Symbol(name.removeprefix("\\"))

    def function(self, token: lark.Token, *rest: Any) -> Expr:
        name, scripts, argument = token[1:], dict(rest[:-1]), rest[-1]
        if name in _ANGLES:
            argument = argument.subs(DEGREE, sympy.pi / 180)
        if "_" in scripts:
            if name not in ("log", "ln"):
                raise UnreadableError(f"{name} with a base")
            value = sympy.log(argument) / sympy.log(scripts["_"])
        elif scripts.get("^") == -1 and name in _ANGLES:
            return _FUNCTIONS["arc" + name](argument)
        else:
            value = _FUNCTIONS[name](argument)
        return self.raised(value, scripts["^"]) if "^" in scripts else value

    def series(self, mark: str, begin: Expr, end: Expr, body: Expr) -> Expr:
        kind = sympy.Sum if mark.startswith(r"\sum") else sympy.Product
        return kind(body, (Symbol(mark[-2]), begin, end))

    def limit(self, mark: str, end: Expr, body: Expr) -> Expr:
        return sympy.Limit(body, Symbol(mark[mark.index("{") + 1]), end, "+-")

    def integral(self, begin: Expr, end: Expr, *rest: Any) -> Expr:
        body = rest[0] if len(rest) == 2 else Integer(1)
        return sympy.Integral(body, (Symbol(rest[-1].removeprefix(r"\diff").strip("\\ ")), begin, end))

    def matrix(self, begin: str, *rows: list[Expr]) -> Expr:
        matrix = sympy.ImmutableMatrix([row for row in rows if isinstance(row, list)])
        return matrix.det() if begin == r"\begin{vmatrix}" else matrix
