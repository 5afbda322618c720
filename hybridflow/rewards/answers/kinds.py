"""Kinds of answers. Each recogniser reads a complete answer of its kind, leaves it to the next one, or refuses it.

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
        given: the answer to compare with it.
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
        readings = exactly(read(answer))
        if any(isinstance(reading, Quantity) for reading in expected):  # 10m, which is a product elsewhere
            readings = (*readings, *exactly(read(_UNSPACED.sub(" ", answer))))
    except Exception:  # UnreadableError, or one of SymPy: the given answer's fault
        return False
    try:
        return equal(expected, readings, tolerance)
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
        if readings := recognise(text):
            return (*readings, *_as_formula(words.possible_formula(text)))
    if readings := quantity(text):
        return readings
    if swapped := re.fullmatch(r"([\](\[])(.*,.*)([\[)\]])", text):  # an interval as ]0, 1[
        text = swapped[1].replace("]", "(") + swapped[2] + swapped[3].replace("[", ")")
    for kind in KINDS:
        if readings := kind(text):
            return readings
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
    rows = []
    for row in filter(None, split(inside[2], r"\\\\")[0]):
        cells = [cell for cell in (_BETWEEN.sub("", cell) for cell in split(row, "&")[0]) if cell]
        if inside[1] == "cases" and len(cells) == 2 and not _has_sign(cells[0]):
            rows.append((Items("()", tuple(map(read, cells))),))
        else:
            rows.append(read(" ".join(cells)))
    return (Items("", tuple(rows)),)


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
    conditions = [
        condition
        for condition in split(brackets[1][brackets[1].index(marks[0]) + len(marks[0]) :], _AND)[0]
        if condition
    ]
    name, sign = split(variable, r"\\in(?![A-Za-z])")
    if sign and name[1] != r"\mathbb{R}":
        conditions.append(variable)
    if len(name[0]) == 1 and name[0].isalpha() and (name[0] == "x" or "x" not in _letters(text)):
        conditions = [_renamed(condition, name[0], "x") for condition in conditions]  # its name does not matter
    readings = [read(condition) for condition in conditions]
    regions = [_as_region(reading[0]) for reading in readings]
    if all(regions) and len({region.variable for region in regions if region}) == 1:
        values = sympy.Intersection(*(region.values for region in regions if region))
        if isinstance(values, sympy.FiniteSet):
            return (Items("{}", tuple((element,) for element in values)),)
        return (Region(None, values),)
    return (Items("|", (read(name[0]), *readings)),)


_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")


def _letters(text: str) -> set[str]:
    return set(_LETTER.findall(text))


def _renamed(text: str, old: str, new: str) -> str:
    return _LETTER.sub(lambda match: new if match[0] == old else match[0], text)


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
    match = _CONGRUENCE.fullmatch(text)
    if not match or (match[1] is None and match[4] != r"\pmod"):
        return None
    residues = [formula(residue) for residue in split(match[2], _JOIN)[0] if residue]
    return (Congruence(formula(match[1].strip()) if match[1] else None, tuple(residues), formula(match[5].strip())),)


def several(text: str) -> Readings | None:
    """Recognise several answers, a sequence with dots, or conditions that hold together."""
    items, marks = split(text, _JOIN)
    signs = [_has_sign(item) for item in items]
    if not marks or (signs[0] and not any(signs[1:])):  # n = 5, 6, 7
        return None
    items = [item for at, item in enumerate(items) if item or not 0 < at < len(marks) or marks[at] not in ("and", "or")]
    if dots := _sequence(items):
        return dots
    domain = re.fullmatch(r"([A-Za-z]) ?\\in ?(.*)", items[-1])
    if domain and domain[2] in _INTEGERS and "k" not in _letters(text):  # its name does not matter
        items = [_renamed(item, domain[1], "k") for item in items]
    readings = tuple(map(read, items))
    values = [reading[0] for reading in readings]
    if len(readings) > 1 and all(isinstance(value, Choice) and not value.content for value in values):
        return (Items("", readings), words.choices(sorted(choice.letter for choice in values)))
    if all(isinstance(value, Region) for value in values) and len({value.variable for value in values}) == 1:
        sets = [region.values for region in values]
        both = sympy.Intersection(*sets)
        either = "or" in marks or (both is S.EmptySet and "and" not in marks)
        return (Region(values[0].variable, sympy.Union(*sets) if either else both),)
    integers = [isinstance(value, Region) and value.variable and value.values == S.Integers for value in values]
    if any(integers) and not all(integers):  # + 2k pi, k \in \mathbb{Z}
        readings = tuple(reading for reading, integer in zip(readings, integers, strict=True) if not integer)
        if len(readings) == 1:
            return readings[0]
    return (Items("", _flat(readings)),)


def _sequence(items: list[str]) -> Readings | None:
    """Recognise the items of a sequence with dots. Raises UnreadableError for an empty item."""
    if not all(items):
        raise UnreadableError("an empty item")
    if not any(item.startswith(_DOTS) for item in items):
        return None
    return (Items("...", tuple((DOTS,) if item == _DOTS else read(item) for item in items)),)


def _flat(items: tuple[Readings, ...]) -> tuple[Readings, ...]:
    """Put the items of lists, such as \\pm 1, in their place."""
    lists = [item[0].items if isinstance(item[0], Items) and not item[0].brackets else (item,) for item in items]
    return tuple(item for entries in lists for item in entries)


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
        (relation,) = _inequality(["x", sides[1]], signs)
        return (Region(None, relation.values),) if isinstance(relation, Region) else (relation,)
    return _inequality(sides, signs)


def _equation(sides: list[str], signs: list[str]) -> Any:
    values = [read(side) for side in sides[1:]]
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
    _check_chain([readings[0] for readings in exact], Rational(1, 10**6))
    for readings in approximate:
        _check_chain([(exact or approximate)[-1 if exact else 0][0], readings[0]], _CLOSE)
    formula_first = "=" not in signs and exact and isinstance(exact[0][0], Expr) and not _is_number(exact[0][0])
    value = approximate[0] if formula_first or not exact else exact[-1]  # x + y \approx 5
    last = value[0]
    if not exact and isinstance(name, str) and not _is_number(last):
        raise UnreadableError("words that are nearly others")
    if exact and approximate and _is_number(last):
        rounded = approximate[0] if _is_rounded(last, approximate[0][0], sides[len(sides) - len(approximate)]) else ()
        numbers = [readings for readings in approximate if _is_number(readings[0])]
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
    if "=" in signs and not all(isinstance(side, Expr | Quantity) for side in (first, last)):
        raise UnreadableError("an equation of other than numbers")
    return value[0]


def _is_number(value: Any) -> bool:
    """True if a value is a number, perhaps with its unit."""
    number = value.number if isinstance(value, Quantity) else value
    return isinstance(number, Expr) and not isinstance(number, MatrixBase) and number.free_symbols <= {DEGREE, PERCENT}


def _is_rounded(value: Any, other: Any, text: str) -> bool:
    """True if another number, which is written with decimals, is a number rounded to these."""
    decimals = re.fullmatch(r"-?(\d*\.(\d+))(?!.*\\times).*", text)
    numbers = [side.number if isinstance(side, Quantity) else side for side in (value, other)]
    if not decimals or not all(map(_is_number, (value, other))) or not Rational(decimals[1]):
        return False
    exact, rounded = (sympy.N(number.subs(_FACTORS), 30) for number in numbers)
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
        value = formula(text)
    except UnreadableError:
        return None
    applied = isinstance(value, sympy.core.function.AppliedUndef) and len(text) < 30 and value.args[0].is_Symbol
    if isinstance(value, Symbol) or applied:
        return value
    call = re.fullmatch(r"([A-Za-z])(?:_\{?\w+\}?)? ?\([a-z](?:, ?[a-z])*\)", plain)  # P(x)
    return Symbol(f"{call[1]}()") if call else None


def _names(text: str) -> list[Symbol]:
    """Names of several values, in brackets."""
    brackets = enclosed(text)
    if not brackets or brackets[0] not in ("(", r"\{"):
        return []
    names = [_name(name) for name in split(brackets[1], ",")[0] if name]
    return [name for name in names if isinstance(name, Symbol)]


def _check_chain(values: list[Any], share: Rational) -> None:
    """Raises UnreadableError for a chain such as 5 = 7, whose numbers differ."""
    plain = [value.number if isinstance(value, Quantity) else value for value in values]
    numbers = [sympy.N(number, 30) for number in plain if isinstance(number, Expr) and number.is_number]
    if any(not abs(one - other) <= share * abs(one) for one, other in pairwise(numbers)):
        raise UnreadableError("an equation that does not hold")


def _membership(left: str, right: str, sign: str) -> Any:
    name = _name(left)
    values = read(right)
    members = as_set(values[0])
    if not isinstance(name, Symbol):
        if _names(left) and sign == r"\in":
            return Named(None, values)
        raise UnreadableError("a member that is no variable")
    if sign == r"\notin":
        if members is None:
            raise UnreadableError("not in what is no set of real numbers")
        return Region(name, sympy.Complement(S.Reals, members))
    return (
        Region(name, members)
        if members is not None and not isinstance(members, sympy.FiniteSet)
        else Named(name, values)
    )


def _inequality(sides: list[str], signs: list[str]) -> Readings:
    values = [formula(side) for side in sides]
    if any(isinstance(value, MatrixBase) for value in values):
        raise UnreadableError("an inequality of matrices")
    relations = [
        Relation(_RELATIONS[sign], two - one if sign in (">", r"\ge") else one - two)
        for one, sign, two in zip(values, signs, values[1:], strict=False)
    ]
    regions = [solutions(relation) for relation in relations]
    names = {region.variable for region in regions if region}
    if all(regions) and len(names) == 1:
        return (Region(names.pop(), sympy.Intersection(*(region.values for region in regions if region))),)
    if len(relations) == 1:
        return (relations[0],)
    step = 1 if set(signs) <= {"<", r"\le"} else -1 if set(signs) <= {">", r"\ge"} else None
    middle = values[1]
    if len(relations) == 2 and step and middle.is_Symbol and not any(end.has(middle) for end in values[::2]):
        first, last = (sign in "<>" for sign in signs[::step])  # with symbols as its ends
        brackets = ("(" if first else "[") + (")" if last else "]")
        return (Named(middle, (Items(brackets, tuple((end,) for end in values[::step][::2])),)),)
    return (Items("", tuple((relation,) for relation in relations)),)


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
        if not any(side.startswith(("[", r"\{", r"\mathbb")) or re.match(r"\([^()]*,", side) for side in sides):
            return None  # of symbols
        values = [read(side) for side in sides]
        sets = [as_set(readings[0]) for readings in values]
        if all(members is not None for members in sets):
            return (Region(None, operation(*sets)),)
        if operation is sympy.Union and all(isinstance(readings[0], Items) for readings in values):
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
    readings = tuple(map(read, items))
    if kind != "{}" and len(_flat(readings)) != len(readings):
        raise UnreadableError("several values in one place of a tuple")
    return (Items(kind, _flat(readings)),)


def signs(text: str) -> Readings | None:
    """Recognise two values: 3 \\pm 2. In a set, and in a list behind a name, only some items are two values."""
    is_set = text.startswith(r"\{") and enclosed(text) is not None
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text) or is_set or split(text, _JOIN)[1]:
        return None
    both = (re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, text)) for plus, minus in ("+-", "-+"))
    return read(", ".join(both))


_BASED = re.compile(
    r"(-?)(?:\(?([0-9][0-9A-Fa-f]*|[A-F][0-9A-F]+)\)?|\\text\{([0-9A-F]+)\})"
    r" ?_ ?\{?(?:\\text\{)?\(?(\d+|[a-z]+)\)?\}{0,2}"
)


def based(text: str) -> Readings | None:
    """Recognise a number in another base: 101_2."""
    match = _BASED.fullmatch("".join(text.split()))
    base = int(match[4]) if match and match[4].isdigit() else words.NUMBERS.get(match[4]) if match else None
    if not match or base is None:
        return None
    try:
        value = int(match[1] + (match[2] or match[3]), int(base))
    except ValueError as error:
        raise UnreadableError(str(error)) from None
    return (Integer(value),) if base == 10 or 0 <= value < min(base, 10) else (Exact("based", (value, base)),)


def ratio(text: str) -> Readings | None:
    """Recognise numbers in proportion: 2:3."""
    sides, marks = split(text, r":|(?<![A-Za-z\\])to(?![A-Za-z])")
    return (Items(":", tuple((formula(side),) for side in sides)),) if marks else None


def span(text: str) -> Readings | None:
    """Recognise whole numbers from one to another, 10-20, which may be a difference."""
    match = re.fullmatch(r"(\d+) ?-{1,2} ?(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        return None
    return (Exact("span", (int(match[1]), int(match[2]))), formula(text))


def decimal(text: str) -> Readings | None:
    """Recognise a number with an exponent, 1.5e3, or one that continues, 0.333..."""
    if match := re.fullmatch(r"([+-]?\d+(?:\.\d+)?) ?[eE] ?([+-]?\d{1,4})", text):
        return (formula(f"{match[1]} \\times 10^{{{match[2]}}}"),)
    if match := re.fullmatch(r"(-?\d*\.\d*?)((\d)\3\3|\d+) ?\\ldots", text):
        return (formula(f"{match[1]}\\overline{{{match[3]}}}" if match[3] else match[1] + match[2]),)
    return None


KINDS = (cases, set_builder, congruence, several, signs, related, set_operation, bracketed, based, ratio, span, decimal)
"""Kinds that are made of parts. The first that recognises an answer reads it; others are formulas."""
