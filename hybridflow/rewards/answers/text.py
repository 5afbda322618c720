"""Answers in one notation: LaTeX, plain text and Unicode."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path


class UnreadableError(ValueError):
    """A text that is not completely understood."""


_GROUPS = re.split(r" {3}|\n", Path(__file__).with_name("notation.txt").read_text(encoding="utf-8").strip())
_NOTATION = {spelling: group.split()[0] for group in _GROUPS for spelling in group.split()[1:]}
"""Notations by others of the same meaning. A group of notation.txt begins with the one that is used here."""
_NOTATION |= {
    chr(code): "\\" + (name.capitalize() if code < 0x3B1 else name)
    for code in (*range(0x391, 0x3A2), *range(0x3A3, 0x3AA), *range(0x3B1, 0x3CA))
    for name in [unicodedata.name(chr(code)).split()[-1].lower().replace("lamda", "lambda")]
}
_LONGEST_FIRST = sorted(_NOTATION, key=len, reverse=True)
_SPELLING = re.compile(
    "|".join(
        re.escape(spelling) + r"(?![A-Za-z])" * spelling[-1].isalpha()
        for spelling in _LONGEST_FIRST
        if spelling.isascii()
    )
    + r"|[^\x00-\x7f]"
)
_DRESS = re.compile(
    r"\\(?:left|right)\s*\.|\\!|\\(?:text)?color\s*\{[^{}]*\}|\\(?:therefore|blacksquare|qed)(?![A-Za-z])|[∴∎■]"
    r"|\\(?:displaystyle|textstyle|left|right|[bB]igg?[lrm]?|limits|nolimits|mathstrut|hfill|nonumber|bf|rm|it)"
    r"(?![A-Za-z])|m(?=\\angle)"
)
_SPACE = re.compile(
    r"\\h?phantom\s*\{[^{}A-Za-z]*\}|\\[hv]space\*?\s*\{[^{}]*\}|(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])"
    r"|\\(?:thin|med|thick)?space(?![A-Za-z])|~|\\\\(?=\s*$)"
)
_OVER = re.compile(r" ?\\over(?![A-Za-z]) ?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MOST_DEPTH = 24
_SYSTEM = re.compile(
    r"\\left ?\\\{ ?\\begin ?\{(array|aligned|matrix)\}(?:\{[lcr]*\})?(.*?)\\end ?\{\1\} ?\\right ?\.?", re.DOTALL
)
"""Equations behind a brace."""
_TEXTS = r"text(?:normal|rm|bf|it|sf|tt|sc)?|mathrm|mbox|hbox|operatorname\*?"
_FONT = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|pmb|symbf)\s*(?=\{)")
TEXT = re.compile(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}")
"""Text in a formula."""
FUNCTIONS = (
    "arc(?:sinh|cosh|tanh|sin|cos|tan|cot|sec|csc)|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|lg|exp|sqrt|gcd|lcm|max"
    "|min|floor|ceil|abs|det|pi|infty|theta|alpha|beta|gamma|lambda|omega|sigma|cup"
)
"""Names that are written with or without a backslash."""

_BEFORE = r"[,;]? ?(?:\\text ?\{)? ?,? ?\b"
_LED_IN = re.compile(
    r"^(?:\\text\{ ?)?(?:the (?:final |correct )?answer is:?|(?-i:Answer|Final [Aa]nswer) ?:)(?: ?\}| (?!\})) ?",
    re.IGNORECASE,
)
_FOR_ALL = re.compile(
    rf"{_BEFORE}for (?:all|any|every|each)(?: real(?: numbers?)?)? ?\}}? ?[A-Za-z](?: ?\\in ?\\mathbb ?\{{?R\}}?)?$"
)
_DOMAIN = re.compile(
    rf"(?:{_BEFORE}(?:where|with|for(?: (?:all|any|every|each|some))?) ?\}}? ?|,? ?\((?:\\text ?\{{where ?\}})?) ?"
    r"([A-Za-z]) ?\\in ?(?:\\math(?:bb|bf|rm))? ?(?:\{ ?Z ?\}|Z)\)?$"
)
"""Words and conditions behind an answer that name its whole numbers."""
_THOUSANDS = re.compile(
    r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\{,\}|\\[,!;: ]|[ \u00a0\u202f~]|,)\d{3})+)(?![\d,]|\s*/\s*\d)"
)
_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
_STEP = (
    r"(?P<open>\\begin(?![A-Za-z])|\\\{|\\(?:langle|lfloor|lceil)(?![A-Za-z])|[(\[{])"
    r"|(?P<close>\\end(?![A-Za-z])|\\\}|\\(?:rangle|rfloor|rceil)(?![A-Za-z])|[)\]}])"
)


def normalise(text: str) -> str:
    """Write an answer in one notation: LaTeX without its dressing, such as dollars, \\left and thin spaces."""
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")  # of no width
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+", r"^{\g<0>}", re.sub("(?<=[①-⑳])(?=[①-⑳])", ", ", text))  # ①③
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙₖₓ]+", r"_{\g<0>}", text)
    text = re.sub(r"([√∛∜]) ?(\d+(?:\.\d+)?)", r"\1{\2}", text)
    text = text.replace("\\\\(", "\\(").strip()
    for _ in range(3):  # a box in dollars in a box
        text = _unwrapped(text.strip().rstrip(".").strip() if not text.endswith("...") else text.strip())
    text = _SPELLING.sub(_spelled, text)
    text = _SYSTEM.sub(r"\\begin{cases}\2\\end{cases}", text)
    text = re.sub(r"\\text\s*\{\s*,?\s*(and|or|mod|to)\s*\}", r" \1 ", _FONT.sub("", _DRESS.sub("", text)))
    text = re.sub(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty", text)
    text = _THOUSANDS.sub(lambda match: _grouped(match, text), text)
    text = _with_fractions(text)
    text = re.sub(r"\s+", " ", _SPACE.sub(" ", text)).strip().rstrip(",;").strip()
    text = re.sub(rf"\\(?:{_TEXTS})\s*(?=\{{)", r"\\text", text)
    return _DOMAIN.sub(r", \1 \\in \\mathbb{Z}", _FOR_ALL.sub("", _LED_IN.sub("", text)))


def _with_fractions(text: str) -> str:
    """Write TeX's {1 \\over 2}, whose operands are the group around it, as \\frac{1}{2}."""
    for _ in range(_MOST_DEPTH):
        if not (over := _OVER.search(text)):
            break
        begin, end, depth = [0], len(text), 0
        for brace in _BRACE.finditer(text, 0, over.start()):
            if brace[0] == "{":
                begin.append(brace.end())
            elif brace[0] == "}" and len(begin) > 1:
                begin.pop()
        for brace in _BRACE.finditer(text, over.end()):
            depth += (brace[0] == "{") - (brace[0] == "}")
            if depth < 0:
                end = brace.start()
                break
        top, bottom = text[begin[-1] : over.start()], text[over.end() : end]
        text = f"{text[: begin[-1]]}\\frac{{{top}}}{{{bottom}}}{text[end:]}"
    return text


def _spelled(match: re.Match[str]) -> str:
    """Return a symbol in the notation used here, apart from the letter that may follow."""
    notation = _NOTATION.get(match[0]) or unicodedata.normalize("NFKC", match[0]).replace("\N{MINUS SIGN}", "-")
    if "\N{FRACTION SLASH}" in notation:
        return "\\frac{{{}}}{{{}}}".format(*notation.split("\N{FRACTION SLASH}"))
    if notation in ("and", "or"):
        return f" {notation} "
    follows = match.string[match.end() : match.end() + 1].isalpha()
    return notation + " " * (notation[0] == "\\" and notation[-1].isalpha() and follows)


def _grouped(match: re.Match[str], text: str) -> str:
    """Join groups of three digits, unless their commas separate the items of a list in brackets."""
    in_brackets = text.startswith(("(", "[", r"\{", r"\langle")) and not re.search(r",\s", text)
    if "," in match[2] and r"\," not in match[2] and "{,}" not in match[2] and in_brackets:
        return match[0]
    return match[1] + re.sub(r"\D+", "", match[2])


def _unwrapped(text: str) -> str:
    for begin, end in _WRAPPED:
        if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
            inside = text[len(begin) : -len(end)]
            if begin not in inside.replace(r"\$", "") and not inside.endswith("\\"):
                return inside
    if match := re.fullmatch(rf"\\(?:boxed|fbox|{_TEXTS})\s*\{{(.*)\}}", text, re.DOTALL):
        return match[1] if _balanced(match[1]) else text
    # Formulas within a sentence: each pair of dollars that are no money.
    if not re.search(r"\\\$", text) and text.count("$") % 2 == 0 and text.count("$") > 1:
        return text.replace("$", " ")
    return text


def _balanced(text: str) -> bool:
    try:
        split(text, "(?!)")
    except UnreadableError:
        return False
    return True


def split(text: str, marks: str) -> tuple[list[str], list[str]]:
    """Split at marks, a regular expression, that stand outside of all brackets; also return these, in order.

    Raises:
        UnreadableError: a bracket is not closed, closes none, or stands in too many others.
    """
    sections, separators, depth, begin = [], [], 0, 0
    for step in re.finditer(rf"{_STEP}|(?P<mark>{marks})|\\[A-Za-z]+|\\?.", text, re.DOTALL):
        depth += (step["open"] is not None) - (step["close"] is not None)
        if not 0 <= depth <= _MOST_DEPTH:
            raise UnreadableError(
                "a bracket closes none" if depth < 0 else f"more than {_MOST_DEPTH} brackets in others"
            )
        if step["mark"] is not None and depth == 0:
            sections.append(text[begin : step.start()].strip())
            separators.append(step["mark"].strip())
            begin = step.end()
    if depth:
        raise UnreadableError("a bracket is not closed")
    return [*sections, text[begin:].strip()], separators


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Return the bracket that a text begins with, its content, and the bracket that ends it; None for other texts."""
    begin = re.match(_STEP, text)
    if begin is None or begin["open"] in (None, "\\begin"):
        return None
    depth = 0
    for step in re.finditer(rf"{_STEP}|\\[A-Za-z]+|\\?.", text, re.DOTALL):
        depth += (step["open"] is not None) - (step["close"] is not None)
        if depth == 0:
            return (begin[0], text[begin.end() : step.start()].strip(), step[0]) if step.end() == len(text) else None
    return None
