"""Numbers with units, currencies and labels, recognised in the text, since a unit is written like variables."""

from __future__ import annotations

import re

import sympy
from sympy import Rational, Symbol

from hybridflow.rewards.answers import units
from hybridflow.rewards.answers.expression import formula
from hybridflow.rewards.answers.symbols import DEGREE, PERCENT, Formula
from hybridflow.rewards.answers.text import TEXT, UnreadableError, tokens
from hybridflow.rewards.answers.values import Quantity, Readings, Value

_CURRENCY = re.compile(rf"(-?)\s*(?:\\?([{re.escape(''.join(units.CURRENCIES))}]))\s*(.+)")
_MONEY_WORD = re.compile(r"«? ?(Rs|USD|EUR)\.? ?»? ?\.? ?(\d.*)")
_UNIT_BEGINS = re.compile(r"(?:(?<=[\d)}\]!]) ?|(?<=\\pi) )(?=[«A-Za-zμΩ个元])|(?<=[A-Za-z]) ?(?=«)")
_LONGEST_UNIT = 80
_ANGLE = re.compile(
    r"(-?)(\d+(?:\.\d+)?) ?\^ ?\{?\\circ ?\}? ?(\d+(?:\.\d+)?) ?(?:'|\^\{?\\prime\}?)(?: ?(\d+(?:\.\d+)?) ?(?:''|\"))?"
)
_TEMPERATURE = re.compile(r"(.*\S) ?\^ ?\{?\\circ ?\}? ?«? ?([CFK])»?")
_FRACTION = re.compile(r"\\frac ?\{ ?«? ?([A-Za-z]+) ?»? ?\} ?\{ ?«? ?([A-Za-z]+(?:\^\{?\d\}?)?) ?»? ?\}$")
_MICRO = re.compile(r"\\(mu|Omega) ?(?=«?[A-Za-z]*»?$)")
_LABEL = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]{2,}){0,3}")
_SIGNS = {"degrees": DEGREE, "degree": DEGREE, "percent": PERCENT, "percentage": PERCENT}
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?) ?«? ?([^\W\d_]+)\.?»?,? ?(?:«? ?and ?»?)? ?")


def quantity(text: str) -> Readings | None:
    """Recognise a number with a unit, a currency or a label, or several numbers with units that add up."""
    if found := _ANGLE.fullmatch(text):
        angle = sum(Rational(part or 0) / 60**power for power, part in enumerate(found.groups()[1:]))
        return (Formula(angle * DEGREE * (-1 if found[1] else 1)),)
    marked = re.sub(r"\s+", " ", TEXT.sub(lambda found: f" «{found[1].strip()}» ", text)).strip()
    marked = _MICRO.sub(lambda found: {"mu": "μ", "Omega": "Ω"}[found[1]], _FRACTION.sub(r"«\1»/«\2»", marked))
    if found := _TEMPERATURE.fullmatch(marked):
        return (Quantity(_numeric(found[1]), Symbol(f"unit degree {found[2]}")),)
    if found := _CURRENCY.fullmatch(marked):
        amount = (quantity(_unmarked(found[3])) or (_numeric(found[3]),))[0]
        number = amount.number if isinstance(amount, Quantity) else amount
        if not isinstance(number, Formula):
            raise UnreadableError("money that is no number")
        value = -number.value if found[1] else number.value
        return (Quantity(Formula(value, number.exact), units.named(units.CURRENCIES[found[2]])),)
    if found := _MONEY_WORD.fullmatch(marked):
        return (Quantity(_numeric(found[2]), units.named(found[1])),)
    return _compound(marked) or _with_unit(marked)


def _unmarked(text: str) -> str:
    return text.replace("«", "\\text{").replace("»", "}")


def _numeric(text: str) -> Formula:
    return formula(tokens(_unmarked(text)))


def _compound(text: str) -> Readings | None:
    """Recognise 3 h 20 min: numbers with units of one dimension."""
    total, position, dimensions = Rational(0), 0, set()
    count = 0
    while position < len(text):
        match = _COMPOUND.match(text, position)
        if match is None:
            return None
        try:
            number, unit = units.unit(match[2], labels=False)
        except UnreadableError:
            return None
        factor, dimension = units.strip(unit)
        total += Rational(match[1]) * number * factor
        dimensions.add(dimension)
        position, count = match.end(), count + 1
    if count < 2 or len(dimensions) > 1:
        return None
    return (Quantity(Formula(total), dimensions.pop()),)


def _with_unit(text: str) -> Readings | None:
    for number, unit in _unit_matches(text):
        marked, bare = "«" in unit, unit.replace("«", " ").replace("»", " ").replace("\\cdot", "*").strip()
        try:
            multiplier, product = units.unit(
                bare if "^" in bare else bare.replace("-", " "), labels=marked or len(bare) > 2
            )
            value = _numeric(number)
        except UnreadableError:
            continue
        if bare in _SIGNS:
            return (Formula(value.value * _SIGNS[bare], value.exact),)
        variables = value.value.free_symbols - set(_SIGNS.values())
        labelled = any(str(each).startswith("label") for each in product.free_symbols)
        if isinstance(value.value, sympy.MatrixBase) or (
            (variables if labelled or not marked else False) or (labelled and not marked and not _LABEL.fullmatch(bare))
        ):
            continue
        scaled = Formula(value.value * multiplier, value.exact)
        found: Value = scaled if product == 1 else Quantity(scaled, product)
        if marked or len(bare) > 1 or not bare.isascii():
            return (found,)
        return (found, _numeric(f"{number} {bare}")) if number.endswith(" ") else None  # 5 m, which may be a product
    return None


def _unit_matches(text: str) -> list[tuple[str, str]]:
    """Ways to split a text into a number and a unit, the longest unit first."""
    found = []
    for match in _UNIT_BEGINS.finditer(text, max(0, len(text) - _LONGEST_UNIT)):
        unit = text[match.end() :]
        if re.fullmatch(r"[«»A-Za-zμΩ个元 /^{}\d*.\-]+|[^\\]*\\cdot[^\\]*", unit) and "«" not in text[: match.start()]:
            found.append((text[: match.start()] + (" " if match[0] else ""), unit))
    return found
