"""Formulas as SymPy expressions: a parser that reads all tokens of a formula or refuses it.

Nothing is dropped: fonts and accents are part of a symbol's name, and operators without arithmetic, such as those of
logic and geometry, are functions that only equal themselves.
"""

from __future__ import annotations

from itertools import pairwise

import sympy
from sympy import Expr, Integer, Symbol

from hybridflow.rewards.answers.symbols import (
    ACCENTS,
    ANGLES,
    APPLIED,
    CONSTANTS,
    DEGREE,
    FONTS,
    FUNCTIONS,
    GREEK,
    KNOWN,
    OPERATORS,
    PERCENT,
    SEVERAL,
    SYMMETRIC,
    Formula,
    binomial,
    number,
    power,
    proper,
)
from hybridflow.rewards.answers.text import CLOSING, OPENING, Token, Tokens, UnreadableError, source


def parse(parts: Tokens, *, imaginary: bool = True, tight: bool = False) -> Expr:
    """Read a formula.

    Args:
        parts: its tokens.
        imaginary: `i` is the imaginary unit, and no variable.
        tight: a/bc is a/(bc), and not (a/b)c.

    Raises:
        UnreadableError: a token is left over, or the value cannot be computed.
    """
    parser = _Parser(parts, imaginary, tight)
    try:
        found = parser.formula()
        parser.end()
        return (
            found.doit()
            if found.atoms(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
            else found
        )
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"{source(parts)[:100]!r} cannot be computed: {type(error).__name__}: {error}") from None


def formula(parts: Tokens, *, tight: bool = False) -> Formula:
    """Read a formula. Raises UnreadableError."""
    if not parts:
        raise UnreadableError("an empty formula")
    exact = not any(each.kind == "number" and "." in each.text for each in parts)
    vector = any(each.text == "j" for each in parts)
    value = parse(parts, imaginary=not vector, tight=tight)
    if value.has(sympy.nan, sympy.zoo):
        raise UnreadableError("a value that is not defined")
    return Formula(value, exact)


class _Parser:
    def __init__(self, parts: Tokens, imaginary: bool, tight: bool) -> None:
        self._parts = parts
        self._tight = tight
        self._at = 0
        self._bars = 0
        self._integrals = 0
        self._imaginary = imaginary and not any(
            one.text == "_" and other.text == "i" for one, other in pairwise(each for each in parts if each.text != "{")
        )

    # Tokens.

    def _next(self, ahead: int = 0) -> Token:
        at = self._at + ahead
        return self._parts[at] if at < len(self._parts) else Token("end", "")

    def _is(self, *texts: str) -> bool:
        return self._next().text in texts and self._next().kind not in ("letter", "text")

    def _take(self, *texts: str) -> Token:
        token = self._next()
        if token.kind == "end" or (texts and token.text not in texts):
            raise UnreadableError(f"{token.text or 'the end'!r} where {' or '.join(texts) or 'a term'} is expected")
        self._at += 1
        return token

    def end(self) -> None:
        if self._at < len(self._parts):
            raise UnreadableError(f"{self._next().text!r} cannot be read here")

    # Rules, from those that bind least.

    def formula(self, level: int = 0) -> Expr:
        if level == len(OPERATORS):
            return self._sum()
        found = self.formula(level + 1)
        while any(self._is("\\" + name) for name in OPERATORS[level]):
            name = self._take().text[1:]
            terms = [found, self.formula(level + 1)]
            if name in SYMMETRIC:  # associative too, as far as answers go
                terms = [
                    each for term in terms for each in (term.args if term.func == sympy.Function(name) else [term])
                ]
                terms = sorted(terms, key=sympy.default_sort_key)
            found = sympy.Function(name)(*terms)
        return found

    def _sum(self) -> Expr:
        found = self._signed()
        while self._is("+", "-"):
            found = found + self._product() if self._take().text == "+" else found - self._product()
        return found

    def _signed(self) -> Expr:
        if self._is("+", "-"):
            return self._signed() if self._take().text == "+" else -self._signed()
        if self._is(r"\neg"):
            self._take()
            return sympy.Function("neg")(self._signed())
        return self._product()

    def _product(self) -> Expr:
        found = self._power()
        while True:
            if self._is("*", r"\cdot", r"\times"):
                self._take()
                found = found * self._factor()
            elif self._is("/", r"\div"):
                self._take()
                numeric, below = self._next().kind == "number", self._factor()
                while self._tight and not numeric and self._starts_factor():
                    below = below * self._power()
                found = found / below
            elif self._is(r"\bmod", r"\mod") or self._next() == Token("text", "mod", self._next().spaced):
                self._take()
                found = sympy.Mod(found, self._factor())
            elif self._starts_factor():
                found = found * self._power()
            else:
                return found

    def _factor(self) -> Expr:
        """An explicit factor, which may have a sign."""
        return -self._factor() if self._is("-") and self._take() else self._power()

    def _starts_factor(self) -> bool:
        token = self._next()
        if token.kind == "letter":
            return not (self._integrals and token.text == "d" and self._next(1).kind in ("letter", "command"))
        if token.kind == "command":
            return token.text[1:] in KNOWN
        if token.kind == "symbol":
            return token.text in ("(", "[", "{", r"\lfloor", r"\lceil", r"\langle") or (
                token.text in ("|", "||") and not self._bars
            )
        if token.kind == "number":  # 3!7!, (n + 1)2, n2^n
            before = self._parts[self._at - 1]
            raised = self._next(1).text == "^" and (before.kind == "letter" or before.text == "}")
            return before.text in ("!", ")") or raised
        return token.text.startswith(r"\begin")

    def _power(self) -> Expr:
        base = self._postfix(self._primary())
        while self._is("^"):
            self._take()
            base = self._raised(base)
            base = self._postfix(base)
        return base

    def _raised(self, base: Expr) -> Expr:
        if self._is(r"\circ"):
            self._take()
            return base * DEGREE
        if self._is("{") and self._next(1).text == r"\circ" and self._next(2).text == "}":
            self._at += 3
            return base * DEGREE
        if isinstance(base, sympy.MatrixBase) and self._transposed():
            return base.T
        if self._is("'") or (self._is("{") and self._next(1).text in ("'", r"\prime")):
            raise UnreadableError("a prime of what is no symbol")
        return power(base, self._exponent())

    def _transposed(self) -> bool:
        for length in (1, 3):
            names = [self._next(each).text for each in range(length)]
            if names in (["T"], ["{", "T", "}"], [r"\top"], ["{", r"\top", "}"]):
                self._at += length
                return True
        return False

    def _exponent(self) -> Expr:
        if self._is("+", "-"):
            sign = -1 if self._take().text == "-" else 1
            return sign * self._exponent()
        if self._next().kind == "number":
            return number(self._take().text)
        if self._is("("):
            return self._bracketed()
        return self._argument()

    def _postfix(self, base: Expr) -> Expr:
        while self._is("!", "%"):
            if self._take().text == "%":
                base = base * PERCENT
            elif base.is_number and (not base.is_Integer or not 0 <= base <= 50_000):
                raise UnreadableError("a factorial of another than a whole number up to 50,000")
            else:
                base = sympy.factorial(base)
        return base

    # Terms.

    def _primary(self) -> Expr:
        token = self._take()
        if token.kind in ("number", "repeating"):
            return self._mixed(number(token.text), token)
        if token.kind == "letter":
            return self._primary() if token.text == "m" and self._is(r"\angle") else self._letter(token.text)
        if token.kind == "text":
            if not token.text.isalpha():
                raise UnreadableError(f"{token.text!r} within a formula")
            return self._symbol(token.text)
        if token.kind == "environment":
            self._at -= 1
            return self._matrix()
        if token.kind == "command":
            return self._command(token.text[1:])
        if token.text in ("(", "[", "{", r"\lfloor", r"\lceil"):
            self._at -= 1
            return self._bracketed()
        if token.text in ("|", "||"):
            self._bars += 1
            inside = self.formula()
            self._take(token.text)
            self._bars -= 1
            return sympy.Abs(inside) if token.text == "|" else sympy.Function("norm")(inside)
        raise UnreadableError(f"{token.text!r} where a term is expected")

    def _mixed(self, whole: Expr, token: Token) -> Expr:
        """A whole number, or one with a proper fraction: 2\\frac{1}{3} or 2 1/3. No other number may follow."""
        if self._next().kind == "number":
            top, slash, bottom = self._next(), self._next(1), self._next(2)
            if not (top.spaced and slash.text == "/" and bottom.kind == "number" and token.text.isdigit()):
                raise UnreadableError(f"two numbers side by side: {token.text} {top.text}")
            self._at += 3
            return whole + proper(number(top.text), number(bottom.text))
        if self._is(r"\frac") and token.text.isdigit():
            before = self._at
            self._take()
            top, bottom = self._argument(), self._argument()
            if top.is_Integer and bottom.is_Integer:
                return whole + proper(top, bottom)
            self._at = before
        return whole

    def _letter(self, name: str) -> Expr:
        if name == "e" and not self._is("_"):
            return sympy.E
        if name == "i" and self._imaginary and not self._is("_"):
            return sympy.I
        return self._symbol(name)

    def _symbol(self, name: str) -> Expr:
        """A variable with its subscript and primes, or a function of what stands in parentheses after it."""
        letter = name
        if self._is("_"):
            self._take()
            name += "_" + self._name()
        while self._is("'") or (self._is("^") and self._next(1).text in ("'", r"\prime")):
            self._at += 1 if self._is("'") else 2
            name += "'"
        applied = self._at
        if letter in APPLIED and self._is("^"):
            inverse = [self._next(each).text for each in range(6)]
            if inverse[:6] == ["^", "{", "-", "1", "}", "("]:
                name, applied = name + "^-1", self._at + 5
        if letter in APPLIED and self._parts[applied : applied + 1] and self._parts[applied].text == "(":
            self._at = applied
            return sympy.Function(name)(*self._arguments())
        return Symbol(name)

    def _name(self) -> str:
        """Read a subscript, or the argument of an accent, as text."""
        token = self._take()
        if token.text != "{" or token.kind == "letter":
            return token.text
        begin, depth = self._at, 1
        while depth:
            text = self._take().text
            depth += (text == "{") - (text == "}")
        return " ".join(each.text for each in self._parts[begin : self._at - 1])

    def _command(self, name: str) -> Expr:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name == "frac":
            return self._fraction()
        if name == "binom":
            top, bottom = self._argument(), self._argument()
            return binomial(top, bottom)
        if name == "sqrt":
            root = Integer(2)
            if self._is("["):
                root = self._bracketed()
            radicand = self._bracketed() if self._is("(") else self._argument()
            if root.is_odd and radicand.is_negative:
                return -power(-radicand, 1 / root)
            return power(radicand, 1 / root)
        if name in FUNCTIONS:
            return self._function(name)
        if name in SEVERAL:
            return SEVERAL[name](*self._arguments())
        if name in ("sum", "prod"):
            return self._series(name)
        if name == "int":
            return self._integral()
        if name == "lim":
            return self._limit()
        if name in ("angle", "triangle", "measuredangle"):
            letters = ""
            while self._next().kind == "letter":
                letters += self._take().text
            return (
                Symbol(f"{name} {min(letters, letters[::-1]) if name != 'triangle' else letters}")
                if letters
                else self._symbol(name)
            )
        if name in FONTS:
            return self._font()
        if name == "hat" and (unit := self._next(self._is("{")).text.removeprefix("\\")[:1]) in ("i", "j", "k"):
            self._name()
            return self._letter(unit)
        if name in ACCENTS:
            return self._symbol(f"{name}({self._name()})")
        if name in GREEK:
            return self._symbol(name)
        raise UnreadableError(f"\\{name} cannot be read")

    def _font(self) -> Expr:
        """A bold letter is the letter, and a bold number the number; several letters are a name."""
        if self._is("{") and self._next(1).kind == "command":
            return self._bracketed()
        content = self._name().replace(" ", "")
        if content == "e":
            return sympy.E
        if len(content) == 1 and content.isalpha():
            return self._letter(content)
        if content.replace(".", "", 1).isdigit():
            return number(content)
        return self._symbol(content)

    def _argument(self) -> Expr:
        """One argument of a command: a group, or one digit or letter or command."""
        token = self._next()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            rest = Token("number", token.text[1:])
            self._parts = (*self._parts[: self._at], Token("number", token.text[0]), rest, *self._parts[self._at + 1 :])
            return number(self._take().text)
        if token.kind == "number":
            return number(self._take().text)
        return self._primary()

    def _bracketed(self) -> Expr:
        begin = self._take().text
        bars, self._bars = self._bars, 0
        inside = self.formula()
        if begin == "{" and self._is(r"\choose"):
            self._take()
            inside = binomial(inside, self.formula())
        self._take(CLOSING[OPENING.index(begin)])
        self._bars = bars
        return {r"\lfloor": sympy.floor, r"\lceil": sympy.ceiling}.get(begin, lambda value: value)(inside)

    def _arguments(self) -> list[Expr]:
        begin = self._take("(", r"\{").text
        bars, self._bars = self._bars, 0
        found = [self.formula()]
        while self._is(","):
            self._take()
            found.append(self.formula())
        self._take(CLOSING[OPENING.index(begin)])
        self._bars = bars
        return found

    def _fraction(self) -> Expr:
        names = [self._next(each).text for each in range(8)]
        if names[:4] == ["{", "d", "}", "{"] and names[4] == "d" and names[6] == "}" and self._next(5).kind == "letter":
            self._at += 7
            return sympy.Derivative(self._product(), Symbol(names[5]))
        if names[0] == "{" and names[1] == "d" and names[3:6] == ["}", "{", "d"] and names[7] == "}":
            self._at += 8
            return Symbol(f"d{names[2]}/d{names[6]}")
        top, bottom = self._argument(), self._argument()
        if bottom.is_zero is True:
            raise UnreadableError("a division by zero")
        return top / bottom

    def _function(self, name: str) -> Expr:
        base = raised = None
        while self._is("_", "^"):
            if self._take().text == "_":
                base = self._argument()
            else:
                raised = self._exponent()
        argument = self._bracketed() if self._is("(", "{") else self._bare_argument()
        if name in ANGLES:
            argument = argument.subs(DEGREE, sympy.pi / 180)
        if base is not None:
            if name not in ("log", "ln"):
                raise UnreadableError(f"{name} with a base")
            value = sympy.log(argument) / sympy.log(base)
        elif raised == -1 and name in ANGLES:
            return FUNCTIONS["arc" + name](argument)
        else:
            value = FUNCTIONS[name](argument)
        return power(value, raised) if raised is not None else value

    def _bare_argument(self) -> Expr:
        """The argument of a function without parentheses: factors side by side, up to a function or an operator."""
        found = self._signed() if self._is("-") else self._power()
        while self._starts_factor() and not self._is("(", "[", *(f"\\{each}" for each in FUNCTIONS), "|"):
            found = found * self._power()
        return found

    def _series(self, name: str) -> Expr:
        self._take("_")
        self._take("{")
        variable = self._take()
        self._take("=")
        begin = self.formula()
        self._take("}")
        self._take("^")
        end = self._exponent()
        imaginary, self._imaginary = self._imaginary, self._imaginary and variable.text != "i"
        body = self._product()
        self._imaginary = imaginary
        if variable.kind != "letter":
            raise UnreadableError(f"\\{name} over {variable.text!r}")
        return (sympy.Sum if name == "sum" else sympy.Product)(body, (Symbol(variable.text), begin, end))

    def _integral(self) -> Expr:
        bounds: dict[str, Expr] = {}
        while self._is("_", "^"):
            mark = self._take().text
            bounds[mark] = self._exponent()
        self._integrals += 1
        body = Integer(1) if self._next().text == "d" and self._next(1).kind == "letter" else self._sum()
        self._integrals -= 1
        self._take("d")
        variable = self._take()
        symbol = Symbol(variable.text.removeprefix("\\"))
        if len(bounds) == 2:
            return sympy.Integral(body, (symbol, bounds["_"], bounds["^"]))
        raise UnreadableError("an integral without both bounds")

    def _limit(self) -> Expr:
        self._take("_")
        self._take("{")
        variable = self._take()
        self._take(r"\to")
        end = self.formula(2)
        self._take("}")
        return sympy.Limit(self._product(), Symbol(variable.text), end, "+-")

    def _matrix(self) -> Expr:
        begin = self._take().text
        kind = begin[len(r"\begin{") : -1]
        if kind not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "smallmatrix", "array"):
            raise UnreadableError(f"{begin} cannot be read")
        rows: list[list[Expr]] = [[]]
        while not self._next().text.startswith(r"\end"):
            if self._is("&"):
                raise UnreadableError("an empty cell of a matrix")
            if self._is("\\\\", r"\hline"):
                raise UnreadableError("an empty row of a matrix")
            rows[-1].append(self.formula())
            if self._is("&"):
                self._take()
            elif self._is("\\\\"):
                self._take()
                rows += [[]] if not self._next().text.startswith(r"\end") else []
        self._take(rf"\end{{{kind}}}")
        matrix = sympy.ImmutableMatrix(rows)
        return matrix.det() if kind == "vmatrix" else matrix
