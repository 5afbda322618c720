"""Final answers as votes."""

from __future__ import annotations

import pytest

from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.mathematics import Extract, final_answer
from hybridflow.rewards.votes import NO_VOTE, votes


def config(path: str, **arguments: str) -> RewardConfig:
    return RewardConfig(functions=(RewardFunctionConfig(name="it", path=path, arguments=arguments),))


def test_without_mathematics_the_whole_text_votes() -> None:
    cast = votes([" 42\n", "42", "42.", "", "  "], config("arithmetic"))
    assert cast[0] == cast[1] != cast[2]
    assert cast[3:] == [NO_VOTE, NO_VOTE]
    assert all(0 <= vote < 1 << 63 for vote in cast[:3])


def test_with_mathematics_its_answer_votes() -> None:
    texts = [r"so \boxed{1 / 2}", r"first \boxed{3}, no: \boxed{1/2}.", r"\boxed{0.5}", "one half"]
    cast = votes(texts, config("math"))
    assert cast[0] == cast[1] != cast[2]  # as they are written
    assert cast[3] == NO_VOTE
    tagged = votes(["<answer>7.</answer>", "it is <answer> 7 </answer>"], config("math", extract="tag"))
    assert tagged[0] == tagged[1] != NO_VOTE


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        (r"\boxed{5}" + "\nor 6", "anywhere", "5"),
        ("Well.\nThe answer is 6.", "anywhere", "6"),
        ("Well.\nThe answer is 6.", "last_line", "6"),
        ("", "last_line", None),
        (r"\boxed{}", "boxed", None),
    ],
)
def test_final_answers(text: str, extract: Extract, answer: str | None) -> None:
    assert final_answer(text, extract) == answer
