"""The reward `math`: 1 for a text whose answer equals the right one as mathematics.

    reward:
      functions: [{name: math, path: math, workers: 4, on_failure: drop, arguments: {extract: boxed}}]

Runs in the processes of reward functions. A sample has no verdict if the right answer is not completely understood,
takes too long by itself, or is ambiguous. It gets no reward then, and `on_failure` applies. A response that is not
completely understood, or takes too long to compare, is wrong: a policy cannot make a sample have no verdict.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hybridflow.rewards.builtin import SAMPLE_TIMEOUT_S, TAGS

Extract = Literal["boxed", "last_line", "tag", "anywhere"]
"""Place of the answer in a text: its last \\boxed{}; its last line that is not blank; its last <answer></answer>; or
anywhere, the first of: the last \\boxed{}, the text after "answer is", a last line after ####, the last formula in
dollars, the last line."""

_TAG, _END_OF_TAG = TAGS
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"(\\boxed)\s+(-?[\w.]*\w)")
"""A box without braces, which has all of a number or a word in it."""
_MOST_CHARACTERS = 10_000
"""Longest answer, in characters. A longer one counts as none."""
_QUICK_S = 0.5
"""Limit of a comparison in the first pass, in seconds. Slower ones are repeated at the end, with the full limit."""
_SHARE = 0.95
"""Share of a call's limit within which verdicts are made, so that finished ones are not lost with the call."""
_LED_IN = re.compile(r"^(?:.*?\b(?:answer|result|solution|option|choice)\b\s*(?:is|:|=)\s*:?|#### )", re.IGNORECASE)
_PHRASE = re.compile(r"\banswer(?: is|:)[\s:]*+(?=\S)", re.IGNORECASE)
_RESULT = "\n#### "
"""Mark of GSM8K between a solution and its answer."""
_FORMULA = re.compile(
    r"(?<![\\$])\$\$?(?!\d[\d,.]*(?:\s|$)(?![^$\n=]*+=[^$\n]*+(?<=\S)\$))([^$\n]+)(?<!\\)\$\$?"
    r"|\\\(((?:[^\\\n]|\\[^()\n])++)\\\)|\\\[((?:[^\\\n]|\\[^\[\]\n])++)\\\]"
)
"""Formulas in dollars or brackets. What stands in brackets has none of them, so that a text is read in one pass. A
number after a dollar, and a blank, are money, unless an equation follows that a dollar ends."""
_DISPLAYED = re.compile(r"\$\$\s*+([^$\n]*[^$\s])\s*+\$\$|(?<=\\\[)(\s++)|(?<!\s)(\s++)(?=\\\])")
"""A formula on lines of its own, between dollars, or the blanks inside of its brackets."""
_BOLD = re.compile(r"(?<![\w*)])\*\*(?=\S)((?:[^*\n]|\*(?!\*))+)(?<=\S)\*\*(?!\w)")
"""Bold text of Markdown, which no power is: 2**3."""
_CODE = re.compile(r"(?<!`)(`{1,3})(?!`)([^`\n]+)\1(?!`)|^[ \t]*(?:```+|~~~+)\w*[ \t]*$", re.MULTILINE)
"""Code of Markdown within a line, or a line that begins or ends a block of it."""
_MARKED_LINE = re.compile(r"(?:^|\n)#### [^\n]+\s*\Z")
"""Last line of a text, with the mark of GSM8K."""
_JOINED = re.compile(
    r"(?:[\s,;$&]|\\[()\[\]\\,; ]|\\q?quad|\\text\{ ?,? ?(?:and|or) ?\}|\b(?:and|or)\b"
    r"|(?:[A-Za-z](?:_\{?\w+\}?)?\s*=(?!\s*\w)))*"
)
"""Text between answers that belong together."""


class NoVerdictError(Exception):
    """It is undecided if an answer is right."""


class _TooLongError(NoVerdictError):
    """It took too long."""


class _SlowResponseError(_TooLongError):
    """The right answer was read and evaluated in time, and the response was not compared with it."""


class Mathematics:
    """`score` as a function of rewards: within the limit of each call. Arguments and errors as of `score`."""

    def __init__(
        self, *, extract: Extract = "boxed", digits: int = 6, sample_timeout_s: float = SAMPLE_TIMEOUT_S
    ) -> None:
        _check(extract, digits, sample_timeout_s)
        self._arguments: dict[str, Any] = {"extract": extract, "digits": digits, "sample_timeout_s": sample_timeout_s}

    def prepare(self, fields: Sequence[str] | None) -> list[str]:
        """Columns that it needs. Imports and first comparisons, which take seconds, count for no call."""
        del fields
        _comparer.prepare()
        return ["answers"]

    def __call__(
        self, generated_texts: Sequence[str], *, answers: Sequence[Any], timeout_s: float
    ) -> list[float | Exception]:
        """Compare answers within `timeout_s` seconds. Those that are not tried by then have no verdict."""
        return score(generated_texts, answers, **self._arguments, timeout_s=timeout_s)


def score(
    generated_texts: Sequence[str],
    answers: Sequence[Any],
    *,
    extract: Extract = "boxed",
    digits: int = 6,
    sample_timeout_s: float = SAMPLE_TIMEOUT_S,
    timeout_s: float = math.inf,
) -> list[float | Exception]:
    """1 for a text whose answer equals the right one, 0 for another or none, and an exception without a verdict.

    Exact numbers and formulas are equal if their values are, and numbers with decimals if they agree in `digits`
    digits. Sets are equal in any order, intervals with the same ends, and several answers if each is there and no
    other. Units are converted. A unit that only one answer has is ignored. A response is wrong if it is not completely
    understood, or not compared within the limit while the right answer alone is read and evaluated. Slow comparisons
    come last.

    Args:
        generated_texts: B of them.
        answers: (B,) the right ones: LaTeX or plain text, whole or decimal numbers, or a list of which any is right.
        extract: where a text's answer is.
        digits: behind the point, in which numbers with decimals have to agree; below 1, significant ones.
        sample_timeout_s: limit of a sample, in seconds.
        timeout_s: limit of all of them.

    Raises:
        ValueError: an argument has no valid value.
    """
    _check(extract, digits, sample_timeout_s)
    end = time.monotonic() + _SHARE * timeout_s
    find = _EXTRACTIONS[extract]
    keys, questions = [], {}
    for text, answer in zip(generated_texts, answers, strict=True):
        given = find(text)
        keys.append((given, repr(answer)))  # many responses to a prompt have the same answer
        questions[keys[-1]] = answer
    verdicts: dict[tuple[str | None, str], float | Exception] = {}
    for limit_s in sorted({min(_QUICK_S, sample_timeout_s), sample_timeout_s}):
        for key in [key for key in questions if isinstance(verdicts.get(key, _TooLongError()), _TooLongError)]:
            if end - time.monotonic() <= limit_s:
                if not isinstance(verdicts.get(key), _SlowResponseError):
                    verdicts[key] = _TooLongError(f"no time was left for it within {timeout_s:g} s (timeout_s)")
                continue
            try:
                verdicts[key] = float(_comparer.ask(limit_s, key[0], questions[key], digits))
            except NoVerdictError as error:
                verdicts[key] = error
    return [0.0 if isinstance(verdicts[key], _SlowResponseError) else verdicts[key] for key in keys]


def _check(extract: str, digits: int, sample_timeout_s: float) -> None:
    """Raises ValueError for invalid arguments."""
    if extract not in _EXTRACTIONS:
        raise ValueError(f"extract={extract!r}, expected one of {', '.join(_EXTRACTIONS)}")
    seconds = isinstance(sample_timeout_s, int | float) and 0 < sample_timeout_s < math.inf
    if not isinstance(digits, int) or digits < 0 or not seconds:
        shown = f"{sample_timeout_s:g}" if isinstance(sample_timeout_s, int | float) else repr(sample_timeout_s)
        raise ValueError(
            f"digits={digits!r}, sample_timeout_s={shown}, expected a whole number, at least 0, and seconds above 0"
        )


def final_answer(text: str, extract: Extract) -> str | None:
    """Answer of a text, without white space and a full stop at its end; None where it gives none."""
    answer = _EXTRACTIONS[extract](text)
    if answer is None or len(answer) > _MOST_CHARACTERS:
        return None
    return "".join(answer.split()).rstrip(".") or None


class _Comparer:
    """A process that compares answers, forked from this one, which has imported the library; killed where it hangs.

    Neither the library's own limits nor a signal end what computes without coming back to the interpreter, such as the
    ten billion digits of a tower of powers.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None
        self._prepared = False

    def ask(self, limit_s: float, given: str | None, answer: Any, digits: int) -> bool:
        """True if an answer is right. Raises NoVerdictError."""
        if self._process is None or not self._process.is_alive():
            self._start()
        end = time.monotonic() + limit_s
        checked = False
        try:
            self._connection.send((given, answer, digits))
            while self._connection.poll(max(0.0, end - time.monotonic())):
                verdict = self._connection.recv()
                if verdict is not None:
                    break
                checked = True
            else:
                self.end()
                raise (_SlowResponseError if checked else _TooLongError)(
                    f"no verdict within {limit_s:g} s (sample_timeout_s)"
                )
        except (EOFError, OSError):
            self.end()
            if checked:  # the response's fault
                return False
            raise NoVerdictError("the process that compares answers died, perhaps of its memory") from None
        if isinstance(verdict, str):
            raise NoVerdictError(verdict)
        return bool(verdict)

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None

    def prepare(self) -> None:
        """Import the library and let it compare once, so that a fork has all that it needs."""
        if self._prepared:
            return
        for given, right in ((r"\frac{1}{2}", "0.5"), ("x > 3", "3 < x"), (r"\sqrt{x^2}", "|x|")):
            _is_right(given, right, 6)
        self._prepared = True

    def _start(self) -> None:
        self.prepare()
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_compare, args=(other, self._connection), daemon=True)
        self._process.start()
        other.close()


def _compare(connection: Any, others_end: Any) -> None:
    """Answer questions until the other end closes: None once the right answer is evaluated, and then the verdict."""
    others_end.close()
    while True:
        try:
            given, answer, digits = connection.recv()
        except EOFError:
            return
        try:
            if _is_readable(answer):
                connection.send(None)
            verdict: bool | str = _is_right(given, answer, digits)
        except NoVerdictError as error:
            verdict = str(error)
        except Exception as error:  # the library documents no exceptions
            verdict = f"the comparison with {answer!r} failed: {type(error).__name__}: {error}"
        connection.send(verdict)


_comparer = _Comparer()


def _is_readable(answer: Any) -> bool:
    """True if a right answer, or one of several, can be read and evaluated by itself."""
    from hybridflow.rewards.answers import kinds

    answers = answer if isinstance(answer, list) else [answer]
    return any(
        isinstance(candidate, str | int | float) and kinds.is_readable(_result(candidate)) for candidate in answers
    )


def _is_right(text: str | None, answer: Any, digits: int) -> bool:
    """True if any right answer is equal. Raises NoVerdictError if none is, and one gives no verdict."""
    from hybridflow.rewards.answers import kinds
    from hybridflow.rewards.answers.equality import UndecidedError
    from hybridflow.rewards.answers.text import UnreadableError

    if answer == []:
        raise NoVerdictError("the list of right answers is empty")
    given = "" if text is None or len(text) > _MOST_CHARACTERS else text
    errors = []
    for candidate in answer if isinstance(answer, list) else [answer]:
        if isinstance(candidate, bool) or not isinstance(candidate, str | int | float) or candidate != candidate:
            raise NoVerdictError(f"the right answer is {candidate!r}, expected text, a number, or a list of these")
        try:
            if kinds.is_right(_result(candidate), given, digits):
                return True
        except UnreadableError as error:
            errors.append(NoVerdictError(f"the right answer {candidate!r} cannot be read: {error}"))
        except UndecidedError as error:
            errors.append(NoVerdictError(f"the right answer {candidate!r} can be meant in two ways: {error}"))
    if errors:
        raise errors[0]
    return False


def _result(answer: str | float) -> str:
    """Return the text of a right answer, of a solution of GSM8K what stands behind its mark."""
    return str(answer).rpartition(_RESULT)[2]


def _boxed(text: str) -> str | None:
    """The content of the last \\boxed{} that is not empty, and of those right before it: \\boxed{1} and \\boxed{2}."""
    text = _BARE_BOX.sub(r"\1{\2}", text)
    boxes = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    opened: list[tuple[int, int] | None] = []
    answers: list[tuple[int, int, str]] = []
    for brace in _BRACE.finditer(text):  # in one pass, whatever a model writes
        if brace[0] == "{":
            opened.append((boxes[brace.start()], brace.end()) if brace.start() in boxes else None)
        elif brace[0] == "}" and opened and (box := opened.pop()) is not None:
            begin, content = box[0], text[box[1] : brace.start()].strip()
            while answers and answers[-1][0] > begin:  # boxes in a box are parts of its answer
                answers.pop()
            if content:
                answers.append((begin, brace.end(), content))
    return _joined(text, answers)


def _joined(text: str, answers: list[tuple[int, int, str]]) -> str | None:
    """The last of several answers (begin, end, content), and those before it that only commas and such separate."""
    last: dict[str, None] = {}  # from the end
    for index in range(len(answers) - 1, -1, -1):
        if last and not _JOINED.fullmatch(text, answers[index][1], answers[index + 1][0]):
            break
        content = _BOX.sub("{", answers[index][2])
        last.setdefault(content)
    return ", ".join(reversed(last)) or None


def _last_line(text: str) -> str | None:
    """The last line, without words that lead to it, such as "The answer is", or before its formula in dollars."""
    lines = [line.strip() for line in _plain(text).splitlines() if line.strip()]
    if not lines:
        return None
    line = _LED_IN.sub("", lines[-1]).strip().strip("*").strip()
    return _boxed(line) or _closing_formula(line) or line or None


def _plain(text: str) -> str:
    """A text without bold and the marks of code, whose formulas are on one line each."""
    text = _DISPLAYED.sub(lambda match: f"$${match[1]}$$" if match[1] else "", text)
    return _CODE.sub(lambda match: match[2] or "", _BOLD.sub(r"\1", text))


def _closing_formula(line: str) -> str | None:
    """The formula in dollars with which a sentence ends, or several that belong together."""
    formulas = [(match.start(), match.end(), next(filter(None, match.groups()))) for match in _FORMULA.finditer(line)]
    if not formulas or line[formulas[-1][1] :].strip(" .*") or not re.search(r"[A-Za-z]{3}", line[: formulas[0][0]]):
        return None
    return _joined(line, formulas)


def _anywhere(text: str) -> str | None:
    if (boxed := _boxed(text)) is not None:
        return boxed
    text = _plain(text)
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        sentence = re.split(r"\.(?:\s|$)", text[phrases[-1].end() :].split("\n")[0])[0].strip("* ")
        return _closing_formula("the " + sentence) or sentence
    if _MARKED_LINE.search(text):
        return _last_line(text)
    formulas = [(match.start(), match.end(), next(filter(None, match.groups()))) for match in _FORMULA.finditer(text)]
    return _joined(text, formulas) or _last_line(text)


def _tagged(text: str) -> str | None:
    end = text.rfind(_END_OF_TAG)
    begin = text.rfind(_TAG, 0, end) if end >= 0 else -1
    if begin < 0:
        return None
    begin += len(_TAG)
    content = text[begin : text.find(_END_OF_TAG, begin)]
    return _boxed(content) or _LED_IN.sub("", _plain(content).strip())


_EXTRACTIONS: dict[str, Callable[[str], str | None]] = {
    "boxed": _boxed,
    "last_line": _last_line,
    "tag": _tagged,
    "anywhere": _anywhere,
}
