"""Units of measurement as products of SymPy symbols, so that 5 km are 5000 m; other words are labels."""

from __future__ import annotations

import re
from functools import cache

import sympy
from sympy import Expr, Integer, Rational, Symbol

from hybridflow.rewards.answers.text import UnreadableError, names

UNITLESS = Symbol("unit")
"""Units without a name, such as square units: as if there were none."""
_BASES = ("m", "g", "s", "A", "K", "mol", "bit", "dollar", "euro", "sterling", "yen", "rupee", "yuan", "month")
_DEFINITIONS = """
m meter metre = 1 m
g gram = 1 g
s sec second = 1 s
A amp ampere = 1 A
K kelvin = 1 K
mol mole = 1 mol
bit = 1 bit
dollar buck USD = 1 dollar
cent penny = 0.01 dollar
euro EUR = 1 euro
pound-sterling = 1 sterling
yen = 1 yen
rupee Rs = 1 rupee
yuan 元 = 1 yuan
month = 1 month
year yr = 12 month
N newton = 1000 g m/s^2
J joule = 1 N m
W watt = 1 J/s
C coulomb = 1 A s
V volt = 1 J/C
Ω ohm Ohm = 1 V/A
F farad = 1 C/V
T tesla = 1 V s/m^2
H henry = 1 V s/A
Pa pascal = 1 N/m^2
Hz hertz = 1 s^-1
L l liter litre = 0.001 m^3
B byte = 8 bit
eV = 1.602176634e-19 J
cal calorie = 4.184 J
min minute = 60 s
h hr hour = 3600 s
day = 24 h
week = 7 day
in inch inche = 0.0254 m
ft foot feet = 12 in
yd yard = 3 ft
mi mile = 1760 yd
mph = 1 mi/h
kmh kph = 1000 m/h
lb pound = 453.59237 g
oz ounce = 0.0625 lb
ton tonne = 1000000 g
gal gallon = 231 in^3
acre = 4840 yd^2
ha hectare = 10000 m^2
cc = 0.000001 m^3
atm = 101325 Pa
rpm = 1 min^-1
"""
_NUMBERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NUMBERS |= {"radian": 1, "rad": 1}
_PREFIXES = {"k": 3, "c": -2, "m": -3, "d": -1, "M": 6, "G": 9, "T": 12, "n": -9, "p": -12, "μ": -6, "h": 2}
_PREFIXES |= {"kilo": 3, "centi": -2, "milli": -3, "mega": 6, "micro": -6, "nano": -9, "giga": 9, "deci": -1}
_PREFIXED = names(
    "m g s A K mol bit N J W C V Ω F T H Pa Hz L l B eV cal meter metre gram liter litre second joule watt volt hertz"
    " byte newton"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_NO_LABEL = names(
    "and or not if when then than to from except where for at least most less more is are was with without no none all"
    " any but the a an between about approximately roughly over under mod plus minus either neither only"
)
"""Words that say more than what is counted: an answer with one of them is no number with a label."""
_UNITS: dict[str, Expr] = {"unit": UNITLESS, "times": UNITLESS, "个": UNITLESS}
_UNIT = re.compile(
    r"\s*(?:(?P<name>[^\W\d_]+\.?)(?:\s*\^?\s*\{?(?P<power>-?[1-9])\}?(?!\d))?|(?P<mark>/|\\cdot|\*|·|-))"
)


@cache
def _known(name: str) -> Expr | None:
    for each in (name, name.lower(), name.removesuffix("s"), name.lower().removesuffix("s"), name.removesuffix("es")):
        if each != name and len(each) == 1:
            continue
        if each in _NUMBERS:
            return Integer(_NUMBERS[each])
        if each in _UNITS:
            return _UNITS[each]
        for prefix, exponent in _PREFIXES.items():
            if each.startswith(prefix) and (base := each.removeprefix(prefix)) in _PREFIXED:
                return _UNITS[base] * Integer(10) ** exponent
    return None


def unit(text: str, *, labels: bool) -> tuple[Expr, Expr]:
    """Read a unit such as `m/s^2`, `square feet` or `million dollars`, and if allowed labels such as `red apples`.

    Returns:
        the number that stands in it, such as a million, and the unit.

    Raises:
        UnreadableError: it is no unit.
    """
    number = found = last = Integer(1)
    position, sign, pending = 0, 1, 1
    label: list[str] = []
    text = text.strip()
    while position < len(text):
        match = _UNIT.match(text, position)
        if match is None:
            raise UnreadableError(f"{text!r} is no unit")
        position = match.end()
        if match["mark"]:
            sign = -1 if match["mark"] == "/" else sign
            continue
        name = match["name"].rstrip(".")
        if name == "per":
            sign = -1
        elif name in _POWERS and name.endswith("ed"):
            found = found * last ** (_POWERS[name] - 1)
        elif name in _POWERS:
            pending = _POWERS[name]
        else:
            one = _known(name)
            if one is None:
                if not labels or len(name) < 2 or name.lower() in _NO_LABEL:
                    raise UnreadableError(f"{text!r} is no unit")
                label.append(name.lower().removesuffix("s"))
                continue
            last = one ** (sign * pending * int(match["power"] or 1))
            if one.is_Integer:
                number = number * last
            else:
                found, sign, pending = found * last, 1, 1
    if label:
        found = found * Symbol("label " + " ".join(label)) ** (1 if sign == 1 else -1)
    return number, found


def named(name: str) -> Expr:
    """Return the unit of a name. Raises KeyError."""
    return _UNITS[name]


def strip(value: Expr) -> tuple[Expr, Expr]:
    """Split a unit into its factor and its dimension."""
    factor, dimension = sympy.sympify(value).as_coeff_Mul()
    return factor, dimension.subs(UNITLESS, 1)


def _define() -> None:
    _UNITS.update({each: Symbol(f"unit {each}") for each in _BASES})
    for line in _DEFINITIONS.strip().splitlines():
        names, _, definition = line.partition(" = ")
        factor, _, product = definition.partition(" ")
        value = Rational(factor) * unit(product, labels=False)[1]
        _UNITS.update(dict.fromkeys(names.split(), value))


_define()
CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
"""Signs of currencies, and their units."""
