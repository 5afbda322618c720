"""Numbers with units: those of Pint, currencies, and labels for other words, such as apples."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pint
from pint.util import to_units_container
from sympy import Expr, Integer, MatrixBase, Rational

from hybridflow.rewards.answers.compare import Quantity, Readings, factor
from hybridflow.rewards.answers.formula import DEGREE, PERCENT, formula
from hybridflow.rewards.answers.text import TEXT, UnreadableError
from hybridflow.rewards.answers.words import NUMBERS

_REGISTRY: pint.UnitRegistry[Fraction] = pint.UnitRegistry(non_int_type=Fraction)
_REGISTRY.load_definitions(Path(__file__).with_name("units.txt"))
_NUMBERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_FRACTIONS = "half third quarter fifth sixth seventh eighth ninth tenth"
_SHARES = {name: Rational(1, share) for share, name in enumerate(_FRACTIONS.split(), 2)} | {
    "halve": Rational(1, 2),
    "fourth": Rational(1, 4),
    "hundredth": Rational(1, 100),
    "thousandth": Rational(1, 1000),
}
"""Fractions as words, without the s of several."""
_SYMBOLS = re.compile(
    r"[cdkmn]?m|[km]?g|[mn]?s|[km]?[NJWV]|m?[lL]|[kKMGT]B|[MG]W|[AKCFTHhΩ元个]|Hz|Pa|eV|in|ft|yd|mi|lb|oz|hr|yr|ha|cc|Rs"
)
"""Names of one or two letters. Pint has many more, which a product of variables often equals."""
_WORDS = {"square", "cubic", "squared", "cubed", "per"}
_ALIASES = {"sq": "square", "cu": "cubic"}
_NO_LABEL = re.compile(
    "and|or|not|if|when|then|than|to|from|except|where|for|at|least|most|less|more|is|are|was|with|without|no|none|all|any"
    "|but|the|an?|between|about|approximately|roughly|over|under|mod|plus|minus|either|neither|only"
    "|negative|choose|root|by|divided|multiplied|factorial|power|point|doubled?|tripled?|halved|squared|cubed"
    "|pi|tau|infinity|(?:co)?(?:sine|tangent|secant)|sin|cos|tan|logs?|logarithms?|ln|sqrt"
)
"""Words that say more than what is counted: an answer with one of them is no number with a label."""
_NAME = re.compile(r"[^\W\d_]+")


@cache
def _known(name: str) -> str | None:
    """Return a name of Pint's for a unit; None if it has none."""
    if name.lower() in ("pi", "tau"):
        return None
    names = (name, name.lower(), name.removesuffix("s"), name.lower().removesuffix("s"))
    for candidate in names if len(name) > 2 else names[:1]:
        if candidate in _WORDS or (candidate in _REGISTRY and (len(candidate) > 2 or _SYMBOLS.fullmatch(candidate))):
            return candidate
    return None


def unit(text: str, *, labels: bool) -> tuple[Expr, pint.Unit, str]:
    """Read a unit such as `m/s^2`, `square feet` or `million dollars`, and if allowed labels such as `red apples`.

    Returns:
        the number that stands in it, such as a million, the unit, and the label.

    Raises:
        UnreadableError: it is no unit.
    """
    number, label = Integer(1), list[str]()

    def known(match: re.Match[str]) -> str:
        nonlocal number
        name = _ALIASES.get(match[0], match[0])
        singular = name.lower().removesuffix("s")
        share = _SHARES.get(singular) if name != singular or match.end() == len(written) else None  # third graders
        if (count := _NUMBERS.get(name.removesuffix("s")) or share) is not None:
            number *= count
            return ""
        if name in ("squared", "cubed") and not match.start():
            raise UnreadableError(f"{text!r} is a power")
        if (unit_name := _known(name)) is not None:
            return unit_name
        arithmetic = _NO_LABEL.fullmatch(name.lower()) or name.lower() in NUMBERS or singular in NUMBERS
        if not labels or len(name) < 2 or arithmetic:
            raise UnreadableError(f"{text!r} is no unit")
        label.append(singular)
        return ""

    written = re.sub(r"(?<=[A-Za-z])\^?(?=-?\d)", "^", re.sub(r"[{}.]", "", text).replace(r"\cdot", "*")).strip(" *")
    try:
        parsed = _REGISTRY.parse_units("unit " + _NAME.sub(known, written).strip(" -*"))
    except UnreadableError:
        raise
    except Exception as error:  # of Pint's parser
        raise UnreadableError(f"{text!r} is no unit: {error}") from None
    return number, parsed, " ".join(label)


_NUMBER, _DEGREE = r"(\d+(?:\.\d+)?)", r" ?\^ ?\{?\\circ ?\}?"
_REWRITTEN = (
    (
        rf"(-?){_NUMBER}{_DEGREE} ?{_NUMBER} ?(?:'|\^\{{?\\prime\}}?)(?: ?{_NUMBER} ?(?:''|\"))?",
        r"\1(\2+\3/60+0\4/3600) «degrees»",
    ),
    (
        rf"(.*?\S)(?:{_DEGREE} ?«?| ?«? ?degrees?) ?([CFK])(?:elsius|ahrenheit|elvin)? ?»?",
        r"\1 «temperature\2»",
    ),
    (r"«? ?(Rs|USD|EUR)\.? ?»? ?\.? ?(\d.*)", r"\2 «\1»"),
    *(
        rewritten
        for sign, name in ((r"\$", "dollar"), ("€", "euro"), ("£", "sterling"), ("¥", "yen"), ("₹", "rupee"))
        for rewritten in (
            (rf"(-?) ?«? ?\\?{sign} ?»? ?(.+)", rf"\1\2 «{name}»"),
            (rf"(.*[\d)}}]) ?«? ?\\?{sign} ?»?", rf"\1 «{name}»"),
        )
    ),
    (r"(.*)\\frac ?\{ ?«? ?([A-Za-z]+) ?»? ?\} ?\{ ?«? ?([A-Za-z]+(?:\^\{?\d\}?)?) ?»? ?\}", r"\1«\2»/«\3»"),
    (r"(.*)\\mu ?(«?[A-Za-z]*»?)", r"\1μ\2"),
    (r"(.*)\\Omega", r"\1Ω"),
)
"""Other notations of a number and its unit."""
_BEGINS = re.compile(r"(?:(?<=[\d)}\]!]) ?|(?<=\\pi) )(?=[«A-Za-zμΩ个元])|(?<=[A-Za-z]) ?(?=«)")
_UNIT = re.compile(r"[«»A-Za-zμΩ个元 /^{}\d*.\-]+|[^\\]*\\cdot[^\\]*")
_LONGEST_UNIT = 80
_LABEL = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]{2,}){0,3}")
_SIGNS = {"degrees": DEGREE, "degree": DEGREE, "percent": PERCENT, "percentage": PERCENT}
_BRACKETED = re.compile(r"^\(([A-Za-z ]+)\)$")
"""Text in brackets, such as (units)."""
_TERM = re.compile(rf"{_NUMBER} ?«? ?([^\W\d_]++)\.?»?,? ?(?:«? ?and ?»?)? ?")


def quantity(text: str) -> Readings | None:
    """Recognise a number with a unit, a currency or a label, or several numbers with units that add up."""
    text = re.sub(r"\s+", " ", TEXT.sub(lambda match: f" «{_BRACKETED.sub(r'\1', match[1].strip())}» ", text)).strip()
    for pattern, notation in _REWRITTEN:
        if match := re.fullmatch(pattern, text):
            text = match.expand(notation)
    if re.fullmatch(f"(?:{_TERM.pattern}){{2,}}", text):
        return _total(_TERM.findall(text))
    for begin in _BEGINS.finditer(text, max(0, len(text) - _LONGEST_UNIT)):
        number, name = text[: begin.start()], text[begin.end() :]
        if _UNIT.fullmatch(name) and "«" not in number and (readings := _with_unit(number, name, begin[0])):
            return readings
    return None


def _total(terms: list[tuple[str, str]]) -> Readings | None:
    """Add numbers with units of one dimension, such as 3 h 20 min."""
    total, read = Rational(0), list[pint.Unit]()
    for number, name in terms:
        hours = bool(read) and read[0].is_compatible_with("h")
        try:
            multiplier, one, _ = unit("min" if name == "m" and hours else name, labels=False)
        except UnreadableError:
            return None
        read.append(one)
        if one.dimensionality != read[0].dimensionality:
            return None
        total += Rational(number) * multiplier * factor(one) / factor(read[0])
    return (Quantity(total, read[0]),)


def _with_unit(number: str, name: str, gap: str) -> Readings | None:
    marked, bare = "«" in name, re.sub("[«»]", " ", name).strip()
    try:
        multiplier, one, label = unit(bare if "^" in bare else bare.replace("-", " "), labels=marked or len(bare) > 2)
        value = formula(number)
    except UnreadableError:
        return None
    if bare in _SIGNS:
        return (value * _SIGNS[bare],)
    unclear = label and not marked and not _LABEL.fullmatch(bare)
    if isinstance(value, MatrixBase) or unclear or (value.free_symbols - {DEGREE, PERCENT} and (label or not marked)):
        return None
    plain = not label and to_units_container(one).keys() <= {"times"}
    result = value * multiplier if plain else Quantity(value * multiplier, one, label)
    if marked or len(bare) > 1 or not bare.isascii():
        return (result,)
    return (result, formula(f"{number} {bare}")) if gap else None  # 5 m, which may be a product
