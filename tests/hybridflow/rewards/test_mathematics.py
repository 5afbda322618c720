"""Answers that are compared as mathematics: pairs with known verdicts, where an answer is found, and what has none."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hybridflow.rewards import mathematics
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.mathematics import NoVerdictError, score
from tests.support.work import growth

LINES = [line for line in Path(__file__).with_name("answers.txt").read_text().splitlines() if line[:2] != "# "]
PAIRS = [tuple(line.rsplit(" | ", 2)) for line in LINES]
HANGING = r"\prod_{k=1}^{10^{9}} (k^2+k+1)"


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    """The process that compares, which has what was open as it was forked."""
    yield
    mathematics._comparer.end()


def test_there_are_as_many_pairs_as_the_page_says() -> None:
    assert len(PAIRS) == len(set(PAIRS)) == 1553
    assert {verdict for *_, verdict in PAIRS} == {"=", "!", "?"}


@pytest.mark.slow
def test_pairs_have_their_known_verdicts() -> None:
    verdicts = [(*pair[:2], _verdict(*pair[:2])) for pair in PAIRS]
    assert not set(verdicts) - set(PAIRS)


def _verdict(right: str, given: str) -> str:
    from hybridflow.rewards.answers.equality import UndecidedError
    from hybridflow.rewards.answers.kinds import is_right
    from hybridflow.rewards.answers.text import UnreadableError

    try:
        return "=" if is_right(right, given, 6) else "!"
    except (UnreadableError, UndecidedError):
        return "?"


def test_texts_of_pairs_have_their_verdicts_as_rewards() -> None:
    pairs = [pair for pair in PAIRS[::40] if pair[2] != "?"]
    right, given, verdicts = zip(*pairs, strict=True)
    rewards = score([rf"Therefore it is \boxed{{{answer}}}." for answer in given], right)
    assert rewards == [float(sign == "=") for sign in verdicts]


@pytest.mark.parametrize(
    ("extract", "text", "right"),
    [
        ("boxed", r"first \boxed{3}, no: \boxed{\frac{1}{2}}", "0.5"),
        ("boxed", r"\boxed{3} and then \boxed{4", "3"),  # the last one is cut off
        ("boxed", r"\fbox{\{1,2\}}", r"\{2,1\}"),
        ("boxed", r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("boxed", r"\boxed{3} then \boxed{5\\}", "5"),  # a line break, and no brace that is escaped
        ("boxed", r"It is \boxed{7}. \boxed{}", "7"),
        ("boxed", r"\boxed{7} \boxed{ }", "7"),
        ("boxed", r"first \boxed{1}, no: \boxed{2} and \boxed{3}", "2, 3"),
        ("boxed", r"So $\boxed{1}$, $\boxed{2}$ and $\boxed{3}$.", "1,2,3"),
        ("boxed", r"$x = \boxed{1}$ or $x = \boxed{2}$", r"\{1,2\}"),
        ("boxed", r"\boxed{4}. I repeat: \boxed{4}", "4"),
        ("boxed", r"\boxed{\boxed{6}}", "6"),
        ("boxed", r"\boxed{1, \boxed{2}}", "1, 2"),
        ("boxed", r"\boxed{1} \\ \boxed{2}", "1, 2"),
        ("boxed", "\\boxed{7\u200b}", "7"),
        ("boxed", r"It is \boxed 7.", "7"),
        ("boxed", r"$\boxed -12$", "-12"),
        ("boxed", r"\boxed{The answer is 7}", "7"),
        ("boxed", r"\boxed{\text{The final answer is } 7}", "7"),
        ("last_line", "I add.\nThe answer is 42.\n\n", "42"),
        ("last_line", "12 + 61 = 73", "73"),
        ("last_line", "She makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18", "18"),
        ("last_line", "The correct option is (B).", "B"),
        ("last_line", r"Hence we get $x = \frac{1}{2}$.", "0.5"),
        ("last_line", r"so that $x = 1$ or $x = 2$.", "1, 2"),
        ("last_line", r"**Answer: $\frac{3}{4}$**", "0.75"),
        ("last_line", r"it is \boxed{7}", "7"),
        ("last_line", "The answer is: **42**.", "42"),
        ("last_line", "The correct answer is **B**.", "B"),
        ("last_line", "**Final Answer**: 2**3", "8"),
        ("last_line", "The total is $40 + 2 = 42$.", "42"),
        ("last_line", "It follows that\n$$\n42\n$$", "42"),
        ("last_line", "I print it:\n```\n42\n```", "42"),
        ("last_line", "Answer: `42`", "42"),
        ("tag", "<answer>\n```python\n42\n```\n</answer>", "42"),
        ("tag", "<answer>1</answer> no <answer> 2/3 </answer>", r"\frac{2}{3}"),
        ("tag", r"<answer>\boxed{5}</answer>", "5"),
        ("tag", "<answer>\nThe answer is 5.\n</answer>", "5"),
        ("tag", "I must put it in <answer> tags. So <answer>42</answer>", "42"),
        ("tag", "<answer>41 no wait <answer>42</answer>", "42"),
        ("tag", "<answer>1</answer> then <answer>2", "1"),
        ("tag", "<answer>42</answer>, and not 17 </answer>", "42"),
        ("anywhere", "So the final answer is $x=9$.", "9"),
        ("anywhere", "The final answer is:\n\n**9**\n\nI hope it is right.", "9"),
        ("anywhere", "The answer is:\n$$\n9\n$$\nas was asked for.", "9"),
        ("anywhere", "It follows that\n\\[\n9\n\\]\nas was asked for.", "9"),
        ("anywhere", "**Answer**: B\n\nI hope it is right.", "B"),
        ("anywhere", r"Hence $3 \cdot 3 = 9$, as was asked for: 8 of $5 or $6", "9"),
        ("anywhere", "The answer is $9$. I hope it is right.", "9"),
        ("anywhere", "The answer is 8. No, the answer is 9.", "9"),
        ("anywhere", r"We get $\frac{18}{2}$ in the end, as was asked for.", "9"),
        (
            "anywhere",
            r"From \(4\) we get \[\begin{pmatrix} 9 \\ 8 \end{pmatrix}\] as was asked for.",
            r"\begin{pmatrix}9\\8\end{pmatrix}",
        ),
        ("anywhere", r"So \( 4 and then \( 9 \), as was asked for.", "9"),
        ("anywhere", "The answer is `9`.", "9"),
        ("anywhere", "Let $x$ be what she pays, so $x = 8 + 1$.\n#### 9", "9"),
        ("anywhere", "and so on " * 1_050 + r"\boxed{9}", "9"),  # however long the text before it
    ],
)
def test_where_the_answer_of_a_text_is(extract: Any, text: str, right: str) -> None:
    assert score([text, text], [right, "1001"], extract=extract) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("extract", "text"),
    [
        ("boxed", "42"),
        ("boxed", ""),
        ("boxed", r"\boxed{}"),
        ("boxed", r"\boxed{41}, \boxed{42}"),
        ("boxed", r"\boxed{41 \text{ or } \boxed{42}}"),
        ("boxed", r"\boxed{41}\boxed{42}"),
        ("boxed", r"\boxed{\{x \mid \sin x > \frac12\}}"),  # SymPy has no such set
        ("last_line", " \n"),
        ("tag", "<answer>42"),
        ("anywhere", "none"),
    ],
)
def test_a_text_without_an_answer_is_wrong(extract: Any, text: str) -> None:
    assert score([text], ["42"], extract=extract) == [0.0]


def test_boxes_that_never_end_are_soon_given_up() -> None:
    assert mathematics._boxed("\\boxed{" * 20_000) is None
    assert growth(mathematics._boxed, "\\boxed{" * 2_000, "\\boxed{" * 4_000) < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\\(", "\\[", "\\( x ", "$ x ", "$1 =", "$$ ", "**a", "\n", "\\boxed{", "answer "])
def test_a_text_is_searched_for_formulas_in_one_pass(text: str) -> None:
    began = time.process_time()
    mathematics._anywhere(text * 40_000)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("right", "given", "verdict"),
    [
        ("east", "seat", 0.0),  # the same letters
        ("east", "east", 1.0),
        ("east", "East.", 1.0),
        ("east", r"\text{east}", 1.0),
        ("east", r"\text{seat}", 0.0),
        ("Monday", "Monday", 1.0),
        ("infinity", r"\infty", 1.0),
        ("half past two", "half past two", 1.0),
    ],
)
def test_words_are_no_product_of_their_letters(right: str, given: str, verdict: float) -> None:
    assert score([rf"\boxed{{{given}}}"], [right]) == [verdict]


def test_right_answers_may_be_numbers_and_several() -> None:
    assert score([r"\boxed{2}"] * 4, [2, 2.0, ["3", "2"], [4, 5]]) == [1.0, 1.0, 1.0, 0.0]
    assert score([r"\boxed{18}"], ["She makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"]) == [1.0]
    assert score([r"\boxed{0.123}"] * 2, ["0.12345"] * 2, digits=2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("right", "why"),
    [
        (None, "the right answer is None, expected text, a number, or a list"),
        (True, "the right answer is True, expected"),
        (math.nan, "the right answer is nan, expected text, a number, or a list"),
        (r"\forall x > 0, f(x) = 0", r"cannot be read: \forall cannot be read"),
        (r"5 \heartsuit", "cannot be read: "),
        ("proof", "the right answer 'proof' cannot be read: it stands for no answer"),
        (r"\text{Not available.}", "cannot be read: it stands for no answer"),
        ([], "the list of right answers is empty"),
        ("", "the right answer '' cannot be read"),
    ],
)
def test_without_a_right_answer_there_is_no_verdict(right: Any, why: str) -> None:
    (verdict,) = score([r"\boxed{2}"], [right])
    assert isinstance(verdict, NoVerdictError) and why in str(verdict)


def test_one_of_several_right_answers_may_be_unreadable() -> None:
    verdicts = score([r"\boxed{2}", r"\boxed{3}"], [["?!", "2"]] * 2)
    assert verdicts[0] == 1.0 and isinstance(verdicts[1], NoVerdictError)


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9^{9}}}", "10^{10^{10}}", "100000!", r"x^{x^{x^{x^{x}}}}", "9" * 9_000),
        *("(" * 1_400 + "1" + ")" * 1_400, "1aand" * 500),
        *("(" * 3_000 + "1" + ")" * 3_000, "-" * 9_000 + "1", "1+" * 4_000 + "1", "1," * 4_000 + "1", "x^2" * 2_000),
        *("ab " * 3_000, r"\text{" * 2_000, r"\frac{1}{" * 2_000 + "1" + "}" * 2_000, r"\frac{1}{0}", r"\sqrt"),
        *("\x00\ud800", r"0^{-1}", "=", r"\log 0", r"\infty - \infty", r"\binom{1}", "1_2_3", ","),
        *("^", "{", r"\pm", "()", r"\{", r"\begin{pmatrix}1&2\\3"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_soon_wrong(text: str) -> None:
    began, before = _cpu_s()
    assert score([rf"\boxed{{{text}}}"], ["1"], sample_timeout_s=120.0) == [0.0]
    ended, after = _cpu_s()
    assert after is not None, "killed after 120 s"
    assert ended - (began if after == before else 0.0) < 10


def _cpu_s() -> tuple[float, int | None]:
    """CPU time that the comparing process has taken, and its id. None where there is none."""
    process = mathematics._comparer._process
    if process is None:
        return 0.0, None
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system, process.pid


def test_the_same_answers_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, ...]] = []

    def ask(limit_s: float, *question: Any) -> bool:
        compared.append(question)
        return True

    monkeypatch.setattr(mathematics._comparer, "ask", ask)
    texts = [r"\boxed{7}", r"So it is \boxed{7}.", r"\boxed{8}", r"\boxed{7}", "none", "none at all"]
    assert score(texts, ["7", "7", "7", 7, "7", "7"]) == [1.0] * 6
    assert [question[:2] for question in compared] == [("7", "7"), ("8", "7"), ("7", 7), (None, "7")]


@pytest.mark.slow
def test_a_response_that_hangs_is_wrong_and_the_others_are_compared() -> None:
    began = time.monotonic()
    before = set(psutil.Process().children())
    texts = [r"\boxed{1}", rf"\boxed{{{HANGING}}}", r"\boxed{1}", r"\boxed{2}"]
    rewards = score(texts, ["3", "1", "1", "1"], sample_timeout_s=2.0)
    assert time.monotonic() - began >= 2.5
    assert rewards == [0.0, 0.0, 1.0, 0.0]
    assert len(set(psutil.Process().children()) - before) <= 1  # what hung is gone


@pytest.mark.slow
def test_a_right_answer_that_hangs_gives_no_verdict() -> None:
    rewards = score([r"\boxed{1}", r"\boxed{1}", r"\boxed{2}"], [HANGING, "1", [HANGING, "1"]], sample_timeout_s=1.0)
    assert rewards[1] == 1.0
    assert {str(rewards[0]), str(rewards[2])} == {"no verdict within 1 s (sample_timeout_s)"}


def test_a_process_that_dies_of_a_response_makes_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(right: str, given: str, digits: int) -> bool:
        os._exit(1)

    mathematics._comparer.end()
    mathematics._comparer.prepare()  # compares once in this process
    with monkeypatch.context() as patch:
        patch.setattr("hybridflow.rewards.answers.kinds.is_right", end)
        assert score([r"\boxed{1}"], ["1"]) == [0.0]
        patch.setattr("hybridflow.rewards.answers.kinds.is_readable", lambda right: os._exit(1))
        (reward,) = score([r"\boxed{1}"], ["1"])
        assert isinstance(reward, NoVerdictError) and "died, perhaps of its memory" in str(reward)
    mathematics._comparer.end()


@pytest.mark.parametrize("responses_hang", [True, False])
def test_what_hangs_takes_no_more_than_the_call_has(responses_hang: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons that take all of their limit, by a clock of their own."""
    now, limits = [0.0], []

    def ask(limit_s: float, given: str | None, answer: Any, digits: int) -> bool:
        limits.append(limit_s)
        if "tower" not in f"{given} {answer}":
            return given == answer
        now[0] += limit_s
        error = mathematics._SlowResponseError if responses_hang else mathematics._TooLongError
        raise error(f"no verdict within {limit_s:g} s (sample_timeout_s)")

    monkeypatch.setattr(mathematics._comparer, "ask", ask)
    monkeypatch.setattr(mathematics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    towers = [f"tower {number}" for number in range(4)]
    plain, hanging = ["1"] * 6, [*towers, "1", "2"]
    given, right = (hanging, plain) if responses_hang else (plain, hanging)
    rewards = score([rf"\boxed{{{text}}}" for text in given], right, sample_timeout_s=2.0, timeout_s=8.0)
    assert limits == [0.5] * 6 + [2.0] * 2 and now[0] < 8
    assert rewards[4:] == [1.0, 0.0]
    if responses_hang:
        assert rewards[:4] == [0.0] * 4
    else:
        assert [str(error) for error in rewards[:4]] == [
            *["no verdict within 2 s (sample_timeout_s)"] * 2,
            *["no time was left for it within 8 s (timeout_s)"] * 2,
        ]


@pytest.mark.processes
@pytest.mark.parametrize(("policy", "workers"), [("drop", 2), pytest.param("value", 1, marks=pytest.mark.release)])
def test_in_a_run_what_has_no_verdict_is_no_wrong_answer(policy: str, workers: int) -> None:
    function = {"name": "math", "path": "math", "workers": workers, "on_failure": policy}
    if policy == "value":
        function["failure_value"] = -0.5
    arguments = {"arguments": {"sample_timeout_s": 1.0}}
    config = RewardConfig.model_validate({"functions": [function | arguments]})
    texts = [r"\boxed{\frac12}", r"\boxed{7}", r"\boxed{3}", rf"\boxed{{{HANGING}}}"]
    with RewardFunctions(config) as rewards:
        result = rewards.evaluate(texts, ["p"] * 4, ["0.5", HANGING, "3", "3"])
    assert result.dropped.tolist() == [False, policy == "drop", False, False]
    kept = [value for value, dropped in zip(result.total.tolist(), result.dropped.tolist(), strict=True) if not dropped]
    assert kept == ([1.0, 1.0, 0.0] if policy == "drop" else [1.0, -0.5, 1.0, 0.0])
    (failure,) = result.failures
    assert "gave none for sample 1" in str(failure) and "no verdict within 1 s" in str(failure)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"extract": "box"}, "extract='box', expected one of boxed, last_line, tag, anywhere"),
        ({"digits": -1}, "digits=-1, sample_timeout_s=5, expected a whole number, at least 0, and seconds"),
        ({"digits": 2.5}, "digits=2.5, sample_timeout_s=5, expected a whole number"),
        ({"sample_timeout_s": math.nan}, "digits=6, sample_timeout_s=nan, expected a whole number"),
        ({"boxed": True}, "boxed: no such argument, expected of extract, digits"),
    ],
)
def test_arguments_that_it_does_not_take_are_refused(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match="math") as error:
        RewardConfig.model_validate({"functions": [{"name": "m", "path": "math", "arguments": arguments}]})
    assert line in str(error.value)


def test_a_sample_never_has_as_long_as_all_of_a_call() -> None:
    function = {"name": "m", "path": "math", "timeout_s": 5.0}
    with pytest.raises(ValueError, match=r"sample_timeout_s=5 \(5 if none\) with timeout_s=5 of all samples of a call"):
        RewardConfig.model_validate({"functions": [function]})
    RewardConfig.model_validate({"functions": [function | {"arguments": {"sample_timeout_s": 4.0}}]})
