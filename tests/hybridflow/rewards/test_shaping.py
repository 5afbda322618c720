"""Rewards of the form of a text, and arguments of reward functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.shaping import length_limit, matches, repetition, script


def test_a_pattern_is_of_the_whole_text() -> None:
    pattern = "<think>.+</think>.+"
    texts = ["<think>a\nb</think>c", "x<think>a</think>c", "<think></think>c", "<think>a</think>"]
    assert matches(texts, pattern=pattern) == [1.0, 0.0, 0.0, 0.0]


def test_length_costs_from_the_soft_limit_to_the_hard_one() -> None:
    texts = ["", "ab", "abc", "abcd", "abcdef", "abcdefgh"]
    assert length_limit(texts, soft=2, hard=6) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert length_limit(["a b", "a b c"], soft=2, hard=2, unit="words") == [0.0, -1.0]


def test_what_is_said_again_costs_its_share() -> None:
    assert repetition(["a b c d", "a b c a b c", "a a a a", "a b", ""]) == [0.0, pytest.approx(-1 / 4), -0.5, 0.0, 0.0]
    assert repetition(["a a b"], words=1) == [pytest.approx(-1 / 3)]


def test_letters_of_a_script_are_counted_alone() -> None:
    texts = ["abc 123!", "ab\u0433\u0434", "日本語 ok", "42"]
    assert script(texts, script="latin") == [1.0, 0.5, pytest.approx(2 / 5), 1.0]
    assert script(texts, script="CJK") == [0.0, 0.0, pytest.approx(3 / 5), 1.0]


@pytest.mark.parametrize(
    ("path", "arguments", "line"),
    [
        ("matches", {"pattern": "("}, "is no regular expression"),
        ("matches", {"pattern": 5}, "pattern 5 is no regular expression"),
        ("matches", {"patern": "a"}, "patern: no such argument, expected of pattern"),
        ("math", {"timeout_s": 3}, "timeout_s: no such argument, expected of extract, digits, sample_timeout_s"),
        ("math", {"sample_timeout_s": "5"}, "digits=6, sample_timeout_s='5', expected a whole number"),
        ("length_limit", {"soft": 5}, "hard is missing and has no default"),
        ("length_limit", {"soft": 4, "hard": 2}, "soft=4, hard=2, expected numbers, 0 <= soft <= hard"),
        ("length_limit", {"soft": 1, "hard": 2, "unit": "tokens"}, "unit='tokens', expected characters or words"),
        ("length_limit", {"soft": "4", "hard": 8}, "soft='4', hard=8, expected numbers, 0 <= soft <= hard"),
        ("repetition", {"words": "3"}, "words='3', expected a whole number, at least 1"),
        ("repetition", {"words": 0}, "words=0, expected a whole number, at least 1"),
        ("repetition", {"words": 2.5}, "words=2.5, expected a whole number, at least 1"),
        ("script", {"script": "KLINGON"}, "script='KLINGON', expected one that Unicode names letters by"),
        ("script", {"script": 5}, "script=5, expected one that Unicode names letters by"),
        ("arithmetic", {"extract": "boxed"}, "'arithmetic', which takes none"),
    ],
)
def test_arguments_are_checked_with_the_recipe(path: str, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match="arguments") as error:
        RewardConfig.model_validate({"functions": [{"name": "form", "path": path, "arguments": arguments}]})
    assert line in str(error.value)


OWN = """
def reward(texts, prompts, bonus=0.0, *, level=0, **more):
    return [len(text) + bonus + 10 * level + 100 * more.get("most", 0) for text in texts]

def plain(texts, prompts, bonus=0.0):
    return [bonus] * len(texts)
"""


def _config(tmp_path: Path, name: str, arguments: dict[str, Any]) -> RewardConfig:
    (tmp_path / "own.py").write_text(OWN)
    function = {"name": "own", "path": f"{tmp_path}/own.py:{name}", "arguments": arguments}
    return RewardConfig.model_validate({"functions": [function]})


@pytest.mark.processes
def test_a_function_of_ones_own_gets_its_arguments_in_every_call(tmp_path: Path) -> None:
    config = _config(tmp_path, "reward", {"bonus": 0.5, "level": 2, "most": 1})
    with RewardFunctions(config, ["level"]) as rewards:  # a field of the data of the same name does not stand before it
        result = rewards.evaluate(["a", "bb"], ["p", "p"], ["", ""], {"level": [7, 7]})
    assert result.total.tolist() == [121.5, 122.5]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"bonsu": 1}, "takes no argument 'bonsu', expected of 'prompts', 'bonus'"),
        ({"prompts": []}, "gets 'prompts' of each sample, expected another of its arguments"),
        ({"texts": []}, "gets 'texts' of each sample, expected another of its arguments"),
    ],
)
def test_an_argument_that_it_does_not_take_is_named(arguments: dict[str, Any], line: str, tmp_path: Path) -> None:
    with (
        RewardFunctions(_config(tmp_path, "plain", arguments)) as rewards,
        pytest.raises(UserError, match="own") as error,
    ):
        rewards.load()
    assert line in str(error.value)
