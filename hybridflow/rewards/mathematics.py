"""The reward `math`: whether the answer in a text is mathematically the right one, by the library Math-Verify.

    reward:
      functions: [{name: math, path: math, workers: 4, on_failure: drop, arguments: {extract: boxed}}]

Runs in the processes of reward functions. Where there is no verdict, since a simplification takes too long or the right
answer cannot be read, a sample gets no reward: what becomes of it says `on_failure`. It is never a wrong answer.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hybridflow.rewards.builtin import SAMPLE_TIMEOUT_S, TAGS

Extract = Literal["boxed", "last_line", "tag", "anywhere"]
"""Where the answer of a text is: in its last \\boxed{}; its last line that is not blank; its last <answer></answer>; or
wherever Math-Verify finds one, the last boxed one first."""

_TAG, _END_OF_TAG = TAGS
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*")
_MOST_CHARACTERS = 10_000
"""Of an answer: what is longer is none."""
_QUICK_S = 0.5
"""What a comparison takes at most, unless it is a long one."""
_SHARE = 0.95
"""Of the limit of a call: what has a verdict by then is not lost with it."""
_LED_IN = re.compile(r"^.*?\b(?:answer|result|solution)\b\s*(?:is|:|=)\s*:?", re.IGNORECASE)
_MONEY = re.compile(r"\\\$")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!;: ](?=\d)")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)")


class NoVerdictError(Exception):
    """Whether an answer is right could not be found out."""


class _TooLongError(NoVerdictError):
    """It took too long."""


class Mathematics:
    """`score` as a function of rewards: within the limit of each call. Arguments and errors as of `score`."""

    def __init__(
        self, *, extract: Extract = "boxed", digits: int = 6, sample_timeout_s: float = SAMPLE_TIMEOUT_S
    ) -> None:
        _check(extract, digits, sample_timeout_s)
        self._arguments: dict[str, Any] = {"extract": extract, "digits": digits, "sample_timeout_s": sample_timeout_s}

    def prepare(self, fields: Sequence[str] | None) -> list[str]:
        """The columns that it needs. What takes seconds at first is done now, which is no call's time."""
        del fields
        _comparer.prepare()
        return ["answers"]

    def __call__(
        self, generated_texts: Sequence[str], *, answers: Sequence[Any], timeout_s: float
    ) -> list[float | Exception]:
        """Compare so many answers within so many seconds; those that are not compared by then have no verdict."""
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

    Equal are answers whose difference simplifies to zero, or that agree in so many digits where they are numbers; sets
    whatever their order; intervals with the same ends; several answers if each is there and no other. A unit that only
    one of them has is left out. What takes long waits for all others.

    Args:
        generated_texts: B of them.
        answers: (B,) the right ones: LaTeX or plain text, whole or decimal numbers, or a list of which any is right.
        extract: where a text's answer is.
        digits: behind the point, in which numbers are to agree.
        sample_timeout_s: limit of a sample, in seconds.
        timeout_s: limit of all of them.

    Raises:
        ValueError: an argument is none that there is.
    """
    _check(extract, digits, sample_timeout_s)
    end = time.monotonic() + _SHARE * timeout_s
    find, anywhere = _EXTRACTIONS[extract], extract == "anywhere"
    keys, questions = [], {}
    for text, answer in zip(generated_texts, answers, strict=True):
        given = find(text)
        keys.append((given, repr(answer)))  # many responses to a prompt have the same answer
        questions[keys[-1]] = answer
    verdicts: dict[tuple[str | None, str], float | Exception] = {}
    for limit_s in sorted({min(_QUICK_S, sample_timeout_s), sample_timeout_s}):
        for key in [key for key in questions if isinstance(verdicts.get(key, _TooLongError()), _TooLongError)]:
            if end - time.monotonic() <= limit_s:
                verdicts[key] = _TooLongError(f"no time was left for it within {timeout_s:g} s (timeout_s)")
                continue
            try:
                verdicts[key] = float(_comparer.ask(limit_s, key[0], questions[key], digits, anywhere))
            except NoVerdictError as error:
                verdicts[key] = error
    return [verdicts[key] for key in keys]


def _check(extract: str, digits: int, sample_timeout_s: float) -> None:
    """Raises ValueError for arguments that there are not."""
    if extract not in _EXTRACTIONS:
        raise ValueError(f"extract={extract!r}, expected one of {', '.join(_EXTRACTIONS)}")
    if not isinstance(digits, int) or digits < 0 or not 0 < sample_timeout_s < math.inf:
        raise ValueError(
            f"digits={digits}, sample_timeout_s={sample_timeout_s:g}, expected a whole number, at least 0, and seconds "
            "above 0"
        )


def final_answer(text: str, extract: Extract) -> str | None:
    """What a text gives as its answer, without white space and a full stop at its end; None where it gives none.

    With `anywhere`, where Math-Verify looks for it: the last boxed one, or else the last line.
    """
    found = _boxed(text) or _last_line(text) if extract == "anywhere" else _EXTRACTIONS[extract](text)
    if found is None or len(found) > _MOST_CHARACTERS:
        return None
    return "".join(found.split()).rstrip(".") or None


class _Comparer:
    """A process that compares answers, forked from this one, which has imported the library; killed where it hangs.

    Neither the library's own limits nor a signal end what computes without coming back to the interpreter, such as the
    ten billion digits of a tower of powers.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None
        self._prepared = False

    def ask(self, limit_s: float, *question: Any) -> bool:
        """Whether an answer is right. Raises NoVerdictError."""
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._connection.send(question)
            verdict = self._connection.recv() if self._connection.poll(limit_s) else None
        except (EOFError, OSError):
            self.end()
            raise NoVerdictError("the process that compares answers died, perhaps of its memory") from None
        if verdict is None:
            self.end()
            raise _TooLongError(f"no verdict within {limit_s:g} s (sample_timeout_s)")
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
        import math_verify

        logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)  # what it cannot read is told in the reward
        _is_right(r"\frac{1}{2}", "0.5", 6, anywhere=False)
        self._prepared = True

    def _start(self) -> None:
        self.prepare()
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_compare, args=(other, self._connection), daemon=True)
        self._process.start()
        other.close()


def _compare(connection: Any, others_end: Any) -> None:
    """Answer questions until the other end closes."""
    others_end.close()
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        try:
            verdict: bool | str = _is_right(*question)
        except NoVerdictError as error:
            verdict = str(error)
        except Exception as error:  # of the library, which promises none
            verdict = f"the comparison with {question[1]!r} failed: {type(error).__name__}: {error}"
        connection.send(verdict)


_comparer = _Comparer()


def _is_right(text: str | None, answer: Any, digits: int, anywhere: bool) -> bool:
    if isinstance(answer, list):
        if not answer:
            raise NoVerdictError("the list of right answers is empty")
        return any(_is_right(text, each, digits, anywhere) for each in answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise NoVerdictError(f"the right answer is {answer!r}, expected text, a number, or a list of these")
    alone = (_boxed(text) or _last_line(text)) if anywhere and text is not None else text
    words, given_words = _words(str(answer)), _words(alone or "")
    if words is not None and given_words is not None:  # no products of their letters
        return _verified(_parsed(f"$\\text{{{words}}}$"), _parsed(f"$\\text{{{given_words}}}$"), digits)
    right = _parsed(_as_math(str(answer)))
    if not right:
        raise NoVerdictError(f"the right answer {answer!r} cannot be read")
    if text is None or (len(text) > _MOST_CHARACTERS and not anywhere):
        return False
    given = _parsed(text if anywhere else _as_math(text))
    return bool(given) and _verified(right, given, digits)


def _parsed(text: str) -> list[Any]:
    import math_verify

    configs = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]
    parsed: list[Any] = math_verify.parse(text, configs, parsing_timeout=None)  # type: ignore[arg-type]
    return parsed


def _verified(right: list[Any], given: list[Any], digits: int) -> bool:
    import math_verify

    return bool(math_verify.verify(right, given, float_rounding=digits, timeout_seconds=None, raise_on_error=True))


def _as_math(text: str) -> str:
    """An answer that stands alone, as the library reads it: LaTeX between dollars."""
    text = _MONEY.sub("", text.strip().rstrip(".").strip())
    text = _THIN_SPACE.sub("", text)
    if found := _SCIENTIFIC.fullmatch(text):
        text = f"{found[1]} \\times 10^{{{int(found[2])}}}"
    return text if not text or any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed")) else f"${text}$"


def _words(text: str) -> str | None:
    """The words that an answer is, alone or as text in LaTeX; None where it is something else."""
    text = text.strip().rstrip(".").strip("$ ")
    found = _TEXT.fullmatch(text)
    text = found[1].strip() if found else text
    return text if _WORDS.fullmatch(text) else None


def _boxed(text: str) -> str | None:
    """What is in the last \\boxed{}, whose braces may hold others; None without a whole one."""
    boxes = {each.end() - 1 for each in _BOX.finditer(text)}
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):  # in one pass, whatever a model writes
        if brace[0] == "{":
            opened.append(brace.end() if brace.start() in boxes else None)
        elif brace[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and (last is None or begin > last[0]):
                last = begin, brace.start()
    return text[last[0] : last[1]] if last is not None else None


def _last_line(text: str) -> str | None:
    """Without words that lead to it, such as "The answer is"."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    line = _LED_IN.sub("", lines[-1]).strip().strip("*").strip()
    return _boxed(line) or line or None


def _tagged(text: str) -> str | None:
    end = text.rfind(_END_OF_TAG)
    begin = text.rfind(_TAG, 0, end) if end >= 0 else -1
    if begin < 0:
        return None
    begin += len(_TAG)
    found = text[begin : text.find(_END_OF_TAG, begin)]
    return _boxed(found) or found


_EXTRACTIONS: dict[str, Callable[[str], str | None]] = {
    "boxed": _boxed,
    "last_line": _last_line,
    "tag": _tagged,
    "anywhere": lambda text: text,
}
