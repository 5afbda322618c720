"""Kinds of answers. Each recogniser reads a whole answer of its kind, leaves it to the next one, or refuses it.

A reference answer that no kind reads completely gives no verdict. A given answer that none reads is wrong.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import sympy
from sympy import Expr, Integer, MatrixBase, Rational, S, Symbol

from hybridflow.placeholders import NEVER_ANSWERS
from hybridflow.rewards.answers import words
from hybridflow.rewards.answers.compare import (
    DOTS,
    ORDERED,
    Choice,
    Congruence,
    Either,
    Exact,
    Items,
    Named,
    Quantity,
    Readings,
    Region,
    Relation,
    as_set,
    equal,
    exactly,
    solutions,
)
from hybridflow.rewards.answers.equality import UndecidedError
from hybridflow.rewards.answers.formula import DEGREE, PERCENT, formula, formulas
from hybridflow.rewards.answers.text import UnreadableError, enclosed, normalise, split
from hybridflow.rewards.answers.units import quantity

_OTHER = Rational(271828, 99991)
"""A number that reference answers are evaluated to be compared with."""
_MOST_CHARACTERS = 3_000
_GAP = re.compile(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])")
"""White space that separates nothing."""
_UNSPACED = re.compile(r"(?<=[\d)}])(?=[A-Za-z]$)")
"""End of a number directly before a unit of one letter."""
_SIGN = r"\\(?:le|ge|ne|in|notin|approx)(?![A-Za-z])|[=<>]"
_JOIN = r"[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_AND = r",|(?<![A-Za-z\\])and(?![A-Za-z])"
_DOTS = r"\ldots"
_INTEGERS = (r"\mathbb{Z}", r"\mathbb Z")
_RELATIONS = {"<": "<", ">": "<", r"\le": "<=", r"\ge": "<=", r"\ne": "!=", "=": "="}
_FACTORS = {DEGREE: sympy.pi / 180, PERCENT: Rational(1, 100)}
_CLOSE = Rational(1, 20)
"""Share in which an approximation may differ from what it approximates."""


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
    tolerance = Rational(1, 10**digits) if re.search(r"\.\d", reference + answer) else None
    try:
        found = exactly(read(answer))
        if any(isinstance(each, Quantity) for each in expected):  # 10m, which is a product elsewhere
            found = (*found, *exactly(read(_UNSPACED.sub(" ", answer))))
    except Exception:  # UnreadableError, or one of SymPy: the given answer's fault
        return False
    try:
        return equal(expected, found, tolerance)
    except UndecidedError:
        raise
    except Exception:  # of SymPy: the given answer's fault if the right one can be compared
        equal(expected, expected, tolerance)
        return False


@lru_cache(maxsize=256)
def is_readable(right: str) -> bool:
    """True if a reference answer can be read and evaluated by itself."""
    try:
        equal(read(normalise(right)), (_OTHER,), None)
    except UndecidedError:
        return True
    except Exception:  # UnreadableError, or one of SymPy
        return False
    return True


@lru_cache(maxsize=256)
def read(text: str) -> Readings:
    """Read a normalised answer, or a part of one. Raises UnreadableError."""
    if not text or len(text) > _MOST_CHARACTERS:
        raise UnreadableError(f"more than {_MOST_CHARACTERS:,} characters" if text else "an empty part")
    if labelled := words.labelled_choice(text):
        return (Choice(labelled[0], read(labelled[1])),)
    for recognise in words.KINDS:
        if found := recognise(text):
            return (*found, *_as_formula(words.possible_formula(text)))
    if found := quantity(text):
        return found
    if swapped := re.fullmatch(r"([\](\[])(.*,.*)([\[)\]])", text):  # an interval as ]0, 1[
        text = swapped[1].replace("]", "(") + swapped[2] + swapped[3].replace("[", ")")
    for kind in KINDS:
        if found := kind(text):
            return found
    return formulas(text)


def _as_formula(text: str | None) -> Readings:
    try:
        return () if text is None else quantity(text) or formulas(text)
    except UnreadableError:
        return ()


_BETWEEN = re.compile(r"^(?:[,;. ]|\\text\{ ?(?:if|for|when|where) ?\}|(?:if|for|when|where)(?![A-Za-z]))+|[,;. ]+$")
"""Marks and words between a value and its condition."""


def cases(text: str) -> Readings | None:
    """Recognise equations of a system, or values of a function with their conditions."""
    inside = re.fullmatch(r"\\begin\{(cases|aligned)\}(.*)\\end\{\1\}", text)
    if not inside:
        return None
    found = []
    for row in filter(None, split(inside[2], r"\\\\")[0]):
        cells = [cell for cell in (_BETWEEN.sub("", cell) for cell in split(row, "&")[0]) if cell]
        if inside[1] == "cases" and len(cells) == 2 and not _has_sign(cells[0]):
            found.append((Items("()", tuple(map(read, cells))),))
        else:
            found.append(read(" ".join(cells)))
    return (Items("", tuple(found)),)


def set_builder(text: str) -> Readings | None:
    """Recognise a set by its condition: \\{x \\mid x > 2\\}."""
    brackets = enclosed(text)
    if not brackets or brackets[0] not in (r"\{", "{"):
        return None
    for mark in (r"\\mid(?![A-Za-z])", ":", r"\|"):
        sides, marks = split(brackets[1], mark)
        if len(marks) % 2 and sides[0]:
            break
    else:
        return None
    variable = sides[0]
    conditions = [each for each in split(brackets[1][brackets[1].index(marks[0]) + len(marks[0]) :], _AND)[0] if each]
    name, sign = split(variable, r"\\in(?![A-Za-z])")
    if sign and name[1] != r"\mathbb{R}":
        conditions.append(variable)
    if len(name[0]) == 1 and name[0].isalpha() and (name[0] == "x" or "x" not in _letters(text)):
        conditions = [_renamed(each, name[0], "x") for each in conditions]  # its name does not matter
    found = [read(each) for each in conditions]
    regions = [_as_region(each[0]) for each in found]
    if all(regions) and len({each.variable for each in regions if each}) == 1:
        values = sympy.Intersection(*(each.values for each in regions if each))
        if isinstance(values, sympy.FiniteSet):
            return (Items("{}", tuple((each,) for each in values)),)
        return (Region(None, values),)
    return (Items("|", (read(name[0]), *found)),)


_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")


def _letters(text: str) -> set[str]:
    return set(_LETTER.findall(text))


def _renamed(text: str, old: str, new: str) -> str:
    return _LETTER.sub(lambda found: new if found[0] == old else found[0], text)


def _as_region(value: Any) -> Region | None:
    if isinstance(value, Region):
        return value
    if isinstance(value, Named) and isinstance(value.name, Symbol):
        values = as_set(value.values[0])
        if values is not None:
            return Region(value.name, values)
        value = value.relation or value
    return solutions(value) if isinstance(value, Relation) else None


_CONGRUENCE = re.compile(r"(?:(.*)\\equiv(?![A-Za-z]))?(.*?) ?(\()? ?(\\[pb]?mod|mod)(?![A-Za-z])(.*?)(?(3)\))")


def congruence(text: str) -> Readings | None:
    """Recognise n \\equiv 1, 2 \\pmod 3."""
    found = _CONGRUENCE.fullmatch(text)
    if not found or (found[1] is None and found[4] != r"\pmod"):
        return None
    residues = [formula(each) for each in split(found[2], _JOIN)[0] if each]
    return (Congruence(formula(found[1].strip()) if found[1] else None, tuple(residues), formula(found[5].strip())),)


def several(text: str) -> Readings | None:
    """Recognise several answers, a sequence with dots, or conditions that hold together."""
    items, marks = split(text, _JOIN)
    signs = [_has_sign(each) for each in items]
    if not marks or (signs[0] and not any(signs[1:])):  # n = 5, 6, 7
        return None
    items = [each for at, each in enumerate(items) if each or not 0 < at < len(marks) or marks[at] not in ("and", "or")]
    if dots := _sequence(items):
        return dots
    domain = re.fullmatch(r"([A-Za-z]) ?\\in ?(.*)", items[-1])
    if domain and domain[2] in _INTEGERS and "k" not in _letters(text):  # its name does not matter
        items = [_renamed(each, domain[1], "k") for each in items]
    found = tuple(map(read, items))
    values = [each[0] for each in found]
    if len(found) > 1 and all(isinstance(each, Choice) and not each.content for each in values):
        return (Items("", found), words.choices(sorted(each.letter for each in values)))
    if all(isinstance(each, Region) for each in values) and len({each.variable for each in values}) == 1:
        sets = [each.values for each in values]
        both = sympy.Intersection(*sets)
        either = "or" in marks or (both is S.EmptySet and "and" not in marks)
        return (Region(values[0].variable, sympy.Union(*sets) if either else both),)
    integers = [isinstance(each, Region) and each.variable and each.values == S.Integers for each in values]
    if any(integers) and not all(integers):  # + 2k pi, k \in \mathbb{Z}
        found = tuple(each for each, integer in zip(found, integers, strict=True) if not integer)
        if len(found) == 1:
            return found[0]
    return (Items("", _flat(found)),)


def _sequence(items: list[str]) -> Readings | None:
    """Recognise the items of a sequence with dots. Raises UnreadableError for an empty item."""
    if not all(items):
        raise UnreadableError("an empty item")
    if not any(each.startswith(_DOTS) for each in items):
        return None
    return (Items("...", tuple((DOTS,) if each == _DOTS else read(each) for each in items)),)


def _flat(items: tuple[Readings, ...]) -> tuple[Readings, ...]:
    """Put the items of lists, such as \\pm 1, in their place."""
    lists = [each[0].items if isinstance(each[0], Items) and not each[0].brackets else (each,) for each in items]
    return tuple(item for each in lists for item in each)


def related(text: str) -> Readings | None:
    """Recognise equations, inequalities, memberships, and chains of these."""
    sides, signs = split(text, _SIGN)
    if not signs:
        return None
    if not sides[0] and signs[0] in ("=", r"\approx"):  # = 5
        return read(text.removeprefix(signs[0]).strip())
    if set(signs) <= {"=", r"\approx"}:
        return (_equation(sides, signs),)
    if len(signs) == 1 and signs[0] in (r"\in", r"\notin"):
        return (_membership(sides[0], sides[1], signs[0]),)
    if {r"\in", r"\notin", r"\approx"} & set(signs):
        raise UnreadableError("a chain of relations of several kinds")
    if not sides[0] and len(sides) == 2:  # < 5
        (found,) = _inequality(["x", sides[1]], signs)
        return (Region(None, found.values),) if isinstance(found, Region) else (found,)
    return _inequality(sides, signs)


def _equation(sides: list[str], signs: list[str]) -> Any:
    values = [read(each) for each in sides[1:]]
    name = _name(sides[0])
    if len(sides) == 2 and name is None and (names := _names(sides[0])) and isinstance(values[0][0], Items):
        items = values[0][0].items
        if len(items) == len(names):  # (x, y) = (1, 2)
            return Items("", tuple((Named(*pair),) for pair in zip(names, items, strict=True)))
    if name is None and signs == ["="] and _name(sides[1]) is not None:
        return _equation(sides[::-1], signs)
    if name is None:
        values.insert(0, read(sides[0]))
    count = (len(signs) - signs[::-1].index("=") if "=" in signs else 0) + (name is None)
    exact, approximate = values[:count], values[count:]
    _check_chain([each[0] for each in exact], Rational(1, 10**6))
    for each in approximate:
        _check_chain([(exact or approximate)[-1 if exact else 0][0], each[0]], _CLOSE)
    formula_first = "=" not in signs and exact and isinstance(exact[0][0], Expr) and not _is_number(exact[0][0])
    value = approximate[0] if formula_first or not exact else exact[-1]  # x + y \approx 5
    last = value[0]
    if not exact and isinstance(name, str) and not _is_number(last):
        raise UnreadableError("words that are nearly others")
    if exact and approximate and _is_number(last):
        rounded = approximate[0] if _is_rounded(last, approximate[0][0], sides[len(sides) - len(approximate)]) else ()
        numbers = [each for each in approximate if _is_number(each[0])]
        value = (Either((*value, *chain.from_iterable(numbers)), (*value, *rounded)),)
    if name is not None:
        relation = None
        if isinstance(last, Expr) and not isinstance(last, MatrixBase) and isinstance(name, Symbol):
            relation = Relation("=", name - last)
        if isinstance(name, str):  # of a segment, and not of what the question asks for, such as Area
            name = Symbol(name) if name.isupper() else None
        return Named(name, value, relation)
    first = values[0][0]
    if isinstance(first, Expr) and isinstance(last, Expr) and (first.free_symbols or last.free_symbols):
        if isinstance(first, MatrixBase) or isinstance(last, MatrixBase):
            raise UnreadableError("an equation of matrices")
        several = len(first.free_symbols) > 1 and first == sympy.Add(*first.free_symbols)
        total = last if last.is_number and several else None
        return Relation("=", first - last, total)
    if "=" in signs and not all(isinstance(each, Expr | Quantity) for each in (first, last)):
        raise UnreadableError("an equation of other than numbers")
    return value[0]


def _is_number(value: Any) -> bool:
    """True if a value is a number, perhaps with its unit."""
    number = value.number if isinstance(value, Quantity) else value
    return isinstance(number, Expr) and not isinstance(number, MatrixBase) and number.free_symbols <= {DEGREE, PERCENT}


def _is_rounded(value: Any, other: Any, text: str) -> bool:
    """True if another number, which is written with decimals, is a number rounded to these."""
    decimals = re.fullmatch(r"-?(\d*\.(\d+))(?!.*\\times).*", text)
    numbers = [each.number if isinstance(each, Quantity) else each for each in (value, other)]
    if not decimals or not all(map(_is_number, (value, other))) or not Rational(decimals[1]):
        return False
    exact, rounded = (sympy.N(each.subs(_FACTORS), 30) for each in numbers)
    step = abs(rounded) / Rational(decimals[1]) / 10 ** len(decimals[2])
    return bool(abs(exact - rounded) <= step * Rational(500_001, 10**6))


def _name(text: str) -> Any:
    """Read the name of an answer before an equals sign: a symbol, a function of one, or words; None for a formula."""
    plain = words.plain(text)
    if words.word(plain):
        return plain
    if re.fullmatch(r"P ?\([^()]+\)", plain):  # of an event
        return Symbol(plain)
    try:
        found = formula(text)
    except UnreadableError:
        return None
    applied = isinstance(found, sympy.core.function.AppliedUndef) and len(text) < 30 and found.args[0].is_Symbol
    if isinstance(found, Symbol) or applied:
        return found
    call = re.fullmatch(r"([A-Za-z])(?:_\{?\w+\}?)? ?\([a-z](?:, ?[a-z])*\)", plain)  # P(x)
    return Symbol(f"{call[1]}()") if call else None


def _names(text: str) -> list[Symbol]:
    """Names of several values, in brackets."""
    brackets = enclosed(text)
    if not brackets or brackets[0] not in ("(", r"\{"):
        return []
    found = [_name(each) for each in split(brackets[1], ",")[0] if each]
    return [each for each in found if isinstance(each, Symbol)]


def _check_chain(values: list[Any], share: Rational) -> None:
    """Raises UnreadableError for a chain such as 5 = 7, whose numbers differ."""
    plain = [each.number if isinstance(each, Quantity) else each for each in values]
    numbers = [sympy.N(each, 30) for each in plain if isinstance(each, Expr) and each.is_number]
    if any(not abs(one - other) <= share * abs(one) for one, other in pairwise(numbers)):
        raise UnreadableError("an equation that does not hold")


def _membership(left: str, right: str, sign: str) -> Any:
    name = _name(left)
    values = read(right)
    found = as_set(values[0])
    if not isinstance(name, Symbol):
        if _names(left) and sign == r"\in":
            return Named(None, values)
        raise UnreadableError("a member that is no variable")
    if sign == r"\notin":
        if found is None:
            raise UnreadableError("not in what is no set of real numbers")
        return Region(name, sympy.Complement(S.Reals, found))
    return Region(name, found) if found is not None and not isinstance(found, sympy.FiniteSet) else Named(name, values)


def _inequality(sides: list[str], signs: list[str]) -> Readings:
    values = [formula(each) for each in sides]
    if any(isinstance(each, MatrixBase) for each in values):
        raise UnreadableError("an inequality of matrices")
    relations = [
        Relation(_RELATIONS[sign], two - one if sign in (">", r"\ge") else one - two)
        for one, sign, two in zip(values, signs, values[1:], strict=False)
    ]
    regions = [solutions(each) for each in relations]
    names = {each.variable for each in regions if each}
    if all(regions) and len(names) == 1:
        return (Region(names.pop(), sympy.Intersection(*(each.values for each in regions if each))),)
    if len(relations) == 1:
        return (relations[0],)
    step = 1 if set(signs) <= {"<", r"\le"} else -1 if set(signs) <= {">", r"\ge"} else None
    middle = values[1]
    if len(relations) == 2 and step and middle.is_Symbol and not any(each.has(middle) for each in values[::2]):
        first, last = (each in "<>" for each in signs[::step])  # with symbols as its ends
        brackets = ("(" if first else "[") + (")" if last else "]")
        return (Named(middle, (Items(brackets, tuple((each,) for each in values[::step][::2])),)),)
    return (Items("", tuple((each,) for each in relations)),)


def _has_sign(text: str) -> bool:
    """True if a relation stands outside of all brackets."""
    return bool(split(text, _SIGN)[1])


_SETS = dict(zip("RZNQC", (S.Reals, S.Integers, S.Naturals, S.Rationals, S.Complexes), strict=True))
_POSITIVE, _NEGATIVE = sympy.Interval.open(0, sympy.oo), sympy.Interval.open(-sympy.oo, 0)
_BOUNDS = {"+": _POSITIVE, ">": _POSITIVE, "-": _NEGATIVE, "<": _NEGATIVE, "*": _POSITIVE + _NEGATIVE}
_OPERATIONS = ((r"\\cup", sympy.Union), (r"\\cap", sympy.Intersection), (r"\\setminus|-", sympy.Complement))


def set_operation(text: str) -> Readings | None:
    """Recognise sets of numbers with their names, unions, intersections and differences."""
    if re.fullmatch(r"\\emptyset|\\\{ ?\\\}|\\phi", text):
        return (Items("{}", ()),)
    if name := re.fullmatch(r"\\mathbb ?\{?([RZNQC])\}?(?:[\^_]\{?([+*><-])0?\}?)?", text):
        values = _SETS[name[1]]
        return (Region(None, sympy.Intersection(values, _BOUNDS[name[2]]) if name[2] else values),)
    for mark, operation in _OPERATIONS:
        sides, marks = split(text, rf"(?:{mark})(?![A-Za-z])")
        if not marks or not all(sides) or (operation is sympy.Complement and len(sides) != 2):
            continue
        if marks[0] == "-" and not (sides[0].startswith(r"\mathbb") and sides[1].startswith(r"\{")):
            continue
        if not any(each.startswith(("[", r"\{", r"\mathbb")) or re.match(r"\([^()]*,", each) for each in sides):
            return None  # of symbols
        values = [read(each) for each in sides]
        found = [as_set(each[0]) for each in values]
        if all(each is not None for each in found):
            return (Region(None, operation(*found)),)
        if operation is sympy.Union and all(isinstance(each[0], Items) for each in values):
            return (Items("", tuple(values)),)  # with symbols as ends
        raise UnreadableError("an operation with other than sets of numbers")
    return None


def bracketed(text: str) -> Readings | None:
    """Recognise tuples, intervals, sets and vectors."""
    brackets = enclosed(text)
    if not brackets or brackets[0] in (r"\lfloor", r"\lceil"):
        return None
    kind = re.sub(r"\\(?![lr])", "", brackets[0] + brackets[2]).replace(r"\langle", "<").replace(r"\rangle", ">")
    items, marks = split(brackets[1], "[,;]")
    if not marks and brackets[0] == "{":  # of LaTeX, and no set that lost its backslashes
        return None
    if not marks and kind in ("()", "[]"):
        wrapped = _has_sign(brackets[1]) or brackets[1].startswith((r"\begin", r"\{", "[", "("))
        return read(brackets[1]) if wrapped else None
    if kind not in (*ORDERED, "{}") or len(set(marks)) > 1:
        raise UnreadableError(f"brackets {brackets[0]} and {brackets[2]}, with {' and '.join(set(marks))}")
    if dots := _sequence(items):
        return dots
    found = tuple(map(read, items))
    if kind != "{}" and len(_flat(found)) != len(found):
        raise UnreadableError("several values in one place of a tuple")
    return (Items(kind, _flat(found)),)


def signs(text: str) -> Readings | None:
    """Recognise two values: 3 \\pm 2."""
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return None
    both = (re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, text)) for plus, minus in ("+-", "-+"))
    return read(", ".join(both))


_BASED = re.compile(
    r"(-?)(?:\(?([0-9][0-9A-Fa-f]*|[A-F][0-9A-F]+)\)?|\\text\{([0-9A-F]+)\})"
    r" ?_ ?\{?(?:\\text\{)?\(?(\d+|[a-z]+)\)?\}{0,2}"
)


def based(text: str) -> Readings | None:
    """Recognise a number in another base: 101_2."""
    found = _BASED.fullmatch("".join(text.split()))
    base = int(found[4]) if found and found[4].isdigit() else words.NUMBERS.get(found[4]) if found else None
    if not found or base is None:
        return None
    try:
        value = int(found[1] + (found[2] or found[3]), int(base))
    except ValueError as error:
        raise UnreadableError(str(error)) from None
    return (Integer(value),) if base == 10 or 0 <= value < min(base, 10) else (Exact("based", (value, base)),)


def ratio(text: str) -> Readings | None:
    """Recognise numbers in proportion: 2:3."""
    sides, marks = split(text, r":|(?<![A-Za-z\\])to(?![A-Za-z])")
    return (Items(":", tuple((formula(each),) for each in sides)),) if marks else None


def span(text: str) -> Readings | None:
    """Recognise whole numbers from one to another, 10-20, which may be a difference."""
    found = re.fullmatch(r"(\d+) ?-{1,2} ?(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        return None
    return (Exact("span", (int(found[1]), int(found[2]))), formula(text))


def decimal(text: str) -> Readings | None:
    """Recognise a number with an exponent, 1.5e3, or one that continues, 0.333..."""
    if found := re.fullmatch(r"([+-]?\d+(?:\.\d+)?) ?[eE] ?([+-]?\d{1,4})", text):
        return (formula(f"{found[1]} \\times 10^{{{found[2]}}}"),)
    if found := re.fullmatch(r"(-?\d*\.\d*?)((\d)\3\3|\d+) ?\\ldots", text):
        return (formula(f"{found[1]}\\overline{{{found[3]}}}" if found[3] else found[1] + found[2]),)
    return None


KINDS = (cases, set_builder, congruence, several, signs, related, set_operation, bracketed, based, ratio, span, decimal)
"""Kinds that are made of parts. The first that recognises an answer reads it; others are formulas."""
