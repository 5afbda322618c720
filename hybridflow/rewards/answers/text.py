"""Answers as tokens: LaTeX, plain text and Unicode in one notation. Each character belongs to a token or is refused."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass


class UnreadableError(ValueError):
    """A text that is not completely understood."""


@dataclass(frozen=True)
class Token:
    """Part of an answer. `kind` is number, command, text, letter or symbol; `spaced` is True after white space."""

    kind: str
    text: str
    spaced: bool = False

    def __str__(self) -> str:
        return f"\\text{{{self.text}}}" if self.kind == "text" else self.text


Tokens = tuple[Token, ...]


def names(text: str) -> tuple[str, ...]:
    """Names that are separated by white space."""
    return tuple(text.split())


_COMMANDS = {  # characters of a kind, and their notation
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("−–‐‑﹣－", "-"),
    **dict.fromkeys("⟨〈", r"\langle "),
    **dict.fromkeys("⟩〉", r"\rangle "),
    **dict.fromkeys("…⋯", r"\ldots "),
    **dict.fromkeys("’′‘", "'"),
    **dict.fromkeys("″”“", "''"),
    **dict.fromkeys("°º", r"^\circ "),
    **dict.fromkeys("∶：", ":"),
    **{
        "、": ", ",
        "。": ".",
        "或": r"\text{ or }",
        "且": r"\text{ and }",
        "⁄": "/",
        "∣": "|",
        "ℯ": "e",
        "ⅈ": "i",
        "√": r"\sqrt ",
        "∛": r"\sqrt[3] ",
        "∜": r"\sqrt[4] ",
    },
    **{mark: rf"\mathbb{{{letter}}}" for mark, letter in zip("ℝℤℚℕℂ", "RZQNC", strict=True)},
    **{
        pair[0]: f"\\{pair[1:]} "
        for pair in names(
            "÷div ∞infty ≤le ⩽le ≥ge ⩾ge ≠ne ≈approx ≡equiv ±pm ∓mp ∈in ∉notin ∪cup ∩cap ⊂subset ⊆subseteq ∅emptyset"
            " ∖setminus ∧land ∨lor ¬neg ⊥perp ∥parallel ∠angle △triangle ≅cong ∼sim ∑sum ∏prod ∫int ⌊lfloor ⌋rfloor"
            " ⌈lceil ⌉rceil ∀forall ∃exists ∂partial ∘circ →to ⟶to ⇒implies ⟹implies ⇔iff ⟺iff ϕphi ϵepsilon µmu"
            " ∴therefore"
        )
    },
}
_GREEK = {
    chr(code): "\\" + (name.capitalize() if code < 0x3B1 else name) + " "
    for code in (*range(0x391, 0x3A2), *range(0x3A3, 0x3AA), *range(0x3B1, 0x3CA))
    for name in [unicodedata.name(chr(code)).split()[-1].lower().replace("lamda", "lambda")]
}
_CIRCLED = re.compile("(?<=[①-⑳])(?=[①-⑳])")
"""Between numbers of statements, such as ①③."""
_SMALL = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+|[₀₁₂₃₄₅₆₇₈₉₊₋ₙₖₓ]+")
_DRESS = re.compile(
    r"\\(?:left|right)\s*\.|\\!|\\(?:text)?color\s*\{[^{}]*\}|\\therefore(?![A-Za-z])"
    r"|\\(?:displaystyle|textstyle|left|right|[bB]igg?[lrm]?|limits|nolimits|mathstrut|hfill|nonumber)(?![A-Za-z])"
)
_SPACE = re.compile(
    r"\\(?:h?phantom|[hv]space\*?)\s*\{[^{}]*\}|(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])"
    r"|\\(?:thin|med|thick)?space(?![A-Za-z])|~|\\\\(?=\s*$)"
)
_TEXTS = "text(?:normal|rm|bf|it|sf|tt|sc)?|mathrm|mbox|hbox|operatorname\\*?"
_BEFORE = r"[,;]? ?(?:\\text ?\{)? ?,? ?\b"
_FOR_ALL = re.compile(
    rf"{_BEFORE}for (?:all|any|every|each)(?: real(?: numbers?)?)? ?\}}? ?[A-Za-z](?: ?\\in ?\\mathbb ?\{{?R\}}?)?$"
)
_DOMAIN = re.compile(
    rf"(?:{_BEFORE}(?:where|with|for(?: (?:all|any|every|each|some))?) ?\}}? ?|,? ?\((?:\\text ?\{{where ?\}})?) ?"
    r"([A-Za-z]) ?\\in ?(?:\\math(?:bb|bf|rm))? ?(?:\{ ?Z ?\}|Z)\)?$"
)
"""Words and conditions behind an answer that name its whole numbers."""
TEXT = re.compile(rf"\\(?:{_TEXTS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
"""A command whose argument is text."""
_SAME = dict(
    pair.split("=")
    for pair in names(
        "dfrac=frac tfrac=frac cfrac=frac dbinom=binom tbinom=binom leq=le leqslant=le geq=ge geqslant=ge neq=ne"
        " dots=ldots cdots=ldots dotsc=ldots dotsb=ldots lbrace={ rbrace=} lvert=| rvert=| vert=| lVert=|| rVert=||"
        " Vert=|| varnothing=emptyset wedge=land vee=lor lnot=neg rightarrow=to Rightarrow=implies lt=< gt=> ast=*"
        " colon=: tg=tan ctg=cot Leftrightarrow=iff Longrightarrow=implies longrightarrow=to lbrack=[ rbrack=]"
        " thickapprox=approx backslash=setminus infinity=infty infin=infty inf=infty lparen=( rparen=)"
        " overrightarrow=vec widehat=hat widetilde=tilde wideparen=arc overparen=arc varepsilon=epsilon"
        " varphi=phi bf= rm= it="
    )
)
"""Commands with the same meaning."""
NAMES = names(
    "arcsinh arccosh arctanh arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh sin cos tan cot sec csc ln log lg"
    " exp sqrt gcd lcm max min floor ceil abs det tg ctg"
)
"""Functions that are written with or without a backslash."""
PLAIN = (*NAMES, *names("pi infinity infty theta alpha beta gamma lambda omega sigma inf cup"))
_JOINING = names("and or mod for if otherwise to where when with percent is not")
_TOKEN = re.compile(
    r"(?P<repeating>\d*\.\d*\\(?:overline|bar|dot|overset\{\.\})\s*\{?\d+\}?)"
    r"|(?P<number>\d+\.\d+|\.\d+|\d+)"
    rf"|\\(?:{_TEXTS})\s*\{{(?P<text>(?:[^{{}}\\]|\\[ ,%$&#]|\{{[^{{}}]*\}})*)\}}"
    r"|(?P<environment>\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}(?:\s*\{[lcr|\s]*\}|\[[lcr|\s]*\])?)"
    r"|\\(?P<command>[A-Za-z]+)"
    rf"|(?<![A-Za-z])(?P<plain>{'|'.join(PLAIN)})(?![A-Za-z])"
    rf"|(?<![A-Za-z])(?P<joining>{'|'.join(_JOINING)})(?![A-Za-z])"
    r"|(?P<symbol>\\\\|\\[{}|%$&#_]|<=|>=|!=|\.\.\.+|:=|\*\*|\|\||[-+*/^_=<>!'|(){}\[\],;:&%.$#\"?@€£¥₹])"
    r"|(?<![A-Za-z])(?P<run>(?![a-d]+(?![A-Za-z]))(?=[A-Za-z]*[aeiouAEIOU])(?=[A-Za-z]*[a-z])[A-Za-z]{4,})"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<word>[^\W\d_A-Za-z]+)"
)
_SYMBOLS = {r"\|": "||", "**": "^", "<=": r"\le", ">=": r"\ge", "!=": r"\ne", ":=": "=", r"\&": "and"}
_SYMBOLS |= {f"\\{each}": each for each in "%$#_"}
OPENING = ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil")
CLOSING = (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil")
AND, OR = ("and",), ("or",)
_THOUSANDS = re.compile(
    r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\{,\}|\\[,!;: ]|[ \u00a0\u202f~]|,)\d{3})+)(?![\d,]|\s*/\s*\d)"
)
_GAP = re.compile(r"[^\d]+")


def normalise(text: str) -> str:
    """Write an answer in one notation: LaTeX without its dressing, such as dollars, \\left and thin spaces."""
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")  # of no width
    text = _SMALL.sub(_small, _CIRCLED.sub(", ", text.strip()))
    text = "".join(_COMMANDS.get(each) or _GREEK.get(each) or _vulgar(each) for each in text)
    text = text.replace("\\\\(", "\\(").strip()
    for _ in range(3):  # a box in dollars in a box
        text = _unwrapped(text.strip().rstrip(".").strip() if not text.endswith("...") else text.strip())
    text = _DRESS.sub("", text)
    text = _THOUSANDS.sub(lambda found: _grouped(found, text), text)
    text = re.sub(r"\s+", " ", _SPACE.sub(" ", text)).strip().rstrip(",;").strip()
    return _DOMAIN.sub(r", \1 \\in \\mathbb{Z}", _FOR_ALL.sub("", text))


def _small(found: re.Match[str]) -> str:
    mark = "^" if found[0][0] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ" else "_"
    return f"{mark}{{{unicodedata.normalize('NFKC', found[0]).replace('−', '-')}}}"


def _vulgar(character: str) -> str:
    plain = unicodedata.normalize("NFKC", character) if character not in "²³" else character
    if "⁄" in plain:
        top, bottom = plain.split("⁄")
        return f"\\frac{{{top}}}{{{bottom}}}"
    return plain


def _grouped(found: re.Match[str], text: str) -> str:
    """Join groups of three digits, unless their commas separate the items of a list in brackets."""
    in_brackets = text.startswith(("(", "[", r"\{", r"\langle")) and not re.search(r",\s", text)
    if "," in found[2] and r"\," not in found[2] and "{,}" not in found[2] and in_brackets:
        return found[0]
    return found[1] + _GAP.sub("", found[2])


_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))


def _unwrapped(text: str) -> str:
    for begin, end in _WRAPPED:
        if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
            inside = text[len(begin) : -len(end)]
            if begin not in inside.replace(r"\$", "") and not inside.endswith("\\"):
                return inside
    if found := re.fullmatch(rf"\\(?:boxed|fbox|{_TEXTS})\s*\{{(.*)\}}", text, re.DOTALL):
        return found[1] if _balanced(found[1]) else text
    # Formulas within a sentence: each pair of dollars that are no money.
    if not re.search(r"\\\$", text) and text.count("$") % 2 == 0 and text.count("$") > 1:
        return text.replace("$", " ")
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def tokens(text: str) -> Tokens:
    """Split a normalised answer. Raises UnreadableError at a character that belongs to no token."""
    found: list[Token] = []
    position, spaced = 0, False
    while position < len(text):
        if text[position].isspace():
            position, spaced = position + 1, True
            continue
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"{text[position : position + 20]!r} cannot be read")
        found.append(_token(match, spaced))
        position, spaced = match.end(), False
    return tuple(each for each in found if each.text)


def _token(match: re.Match[str], spaced: bool) -> Token:
    kind, text = str(match.lastgroup), match[str(match.lastgroup)]
    if kind == "text":
        spaced, text = spaced or text[:1].isspace(), re.sub(r"\\", "", text).strip()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return Token("number", text, spaced)
        if re.fullmatch(r"[A-Za-z]", text):
            return Token("letter", text, spaced)
        if text in PLAIN:
            return _command(text, spaced)
        return Token("symbol" if text in ("%", "$") else "text", text, spaced)
    if kind in ("command", "plain"):
        return _command(text, spaced)
    if kind in ("joining", "word", "run"):  # a run of letters that is a word, and no product of variables
        return Token("text", text, spaced)
    if kind == "environment":
        return Token("environment", re.sub(r"\s|(?<=\})[\[{].*$", "", text), spaced)
    if kind == "symbol":
        text = "\\ldots" if text.startswith("...") else _SYMBOLS.get(text, text)
        return Token("text" if text == "and" else "symbol", text, spaced)
    return Token(kind, text, spaced)


def _command(name: str, spaced: bool) -> Token:
    name = _SAME.get(name, name)
    if name in ("{", "}", "(", ")", "[", "]", "|", "||", "<", ">", ":", "*"):
        return Token("symbol", "\\" + name if name in "{}" else name, spaced)
    if "\\" + name in OPENING + CLOSING:
        return Token("symbol", "\\" + name, spaced)
    return Token("command", "\\" + name if name else "", spaced)


def split(parts: Tokens, separators: Sequence[str]) -> tuple[list[Tokens], list[str]]:
    """Split at the separators that stand outside of all brackets and environments; also return these, in order.

    Raises:
        UnreadableError: a bracket is not closed, or closes none.
    """
    found: list[list[Token]] = [[]]
    marks: list[str] = []
    depth = 0
    for token in parts:
        depth += _step(token)
        if depth < 0:
            raise UnreadableError("a bracket closes none")
        if depth == 0 and token.text in separators and token.kind != "letter":
            marks.append(token.text)
            found.append([])
        else:
            found[-1].append(token)
    if depth:
        raise UnreadableError("a bracket is not closed")
    return [tuple(each) for each in found], marks


def enclosed(parts: Tokens) -> bool:
    """True if the first token is a bracket and the last one closes it."""
    depth = 0
    for at, token in enumerate(parts):
        depth += _step(token)
        if depth <= 0:
            return at == len(parts) - 1 > 0 and depth == 0
    return False


def _step(token: Token) -> int:
    if token.kind == "environment":
        return 1 if token.text.startswith(r"\begin") else -1
    return (token.text in OPENING) - (token.text in CLOSING)


def source(parts: Tokens) -> str:
    """Tokens as the text that they came from, with white space where it was and where two would become one."""
    found = ""
    for each in parts:
        joined = found and (
            each.spaced or (found[-1].isalpha() and each.text[0].isalpha() and re.search(r"\\[A-Za-z]+$", found))
        )
        found += (" " if joined else "") + str(each)
    return found
