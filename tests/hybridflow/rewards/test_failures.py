"""Rewards that fail: only the samples at fault have none, in bounded time."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.processes.handle import RewardInputs, RewardProcess
from hybridflow.rewards.processes.pool import ProcessPool
from hybridflow.rewards.result import RewardFailure, RewardResult, reward_metrics
from hybridflow.rewards.scoring import Scoring, Worker, split_calls

pytestmark = pytest.mark.processes

# What a text says is what the function does with it; any other text has its length for a reward.
SOURCE = """
import os, signal, time
from pathlib import Path

LOG = Path(__file__).with_suffix(".log")
VALUES = {"nan": float("nan"), "word": "much", "none": None, "huge": 1e300, "vast": 10**400, "pid": os.getpid()}

class Unreadable:
    def tolist(self): raise RuntimeError("no values here")

def one(text):
    if text == "raise": raise ValueError("bad text")
    if text == "leave": raise SystemExit(0)
    if text == "hang": time.sleep(600)
    if text == "exit": os._exit(7)
    if text == "kill": os.kill(os.getpid(), signal.SIGKILL)
    return VALUES.get(text, len(text))

def reward(texts):
    with LOG.open("a") as log: log.write(f"{len(texts)}\\n")
    if "nothing" in texts: return None
    if "unreadable" in texts: return Unreadable()
    return [one(text) for text in texts if text != "skip"]
"""


def function(tmp_path: Path, name: str = "mine", source: str = SOURCE, **settings: object) -> RewardFunctionConfig:
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    return RewardFunctionConfig.model_validate({"name": name, "path": f"{path}:reward", **settings})


def evaluated(texts: list[str], *functions: RewardFunctionConfig) -> RewardResult:
    with RewardFunctions(RewardConfig(functions=functions)) as rewards:
        return rewards.evaluate(texts, [""] * len(texts), texts)


def call_sizes(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "mine.log").read_text().split()]


def limits(result: RewardResult) -> list[float]:
    return [float(re.search(r"within ([\d.]+) s", failure.reason)[1]) for failure in result.failures]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", r"raised ValueError at .*mine\.py:12: bad text on sample 2 \('raise'\); expected a number"),
        ("leave", r"raised SystemExit at .*mine\.py:13: 0 on sample 2 \('leave'\); expected a number"),
        ("skip", r"returned 0 values for 1 generated texts, expected one for each"),
        ("nothing", r"returned None \(NoneType\), expected a list of 1 number"),
        ("unreadable", r"raised RuntimeError at .*: no values here on sample 2 \('unreadable'\); expected a number"),
        ("nan", r"returned nan \(float\) for sample 2 \('nan'\), expected a finite number"),
        ("word", r"returned 'much' \(str\) for sample 2 \('word'\), expected a finite number"),
        ("none", r"returned None \(NoneType\) for sample 2 \('none'\), expected a finite number"),
        ("huge", r"returned 1e\+300 for sample 2, expected a number within the range of float32"),
        ("vast", r"returned 10{59} for sample 2, expected a number within the range of float32"),
        ("hang", r"did not return the reward of sample 2 \('hang'\) within 0\.\d+ s and was killed"),
        ("exit", r"ended with exit code 7 instead of returning on sample 2 \('exit'\)"),
        ("kill", r"was killed by SIGKILL instead of returning on sample 2 \('kill'\)"),
    ],
)
def test_only_the_sample_at_fault_loses_its_reward(tmp_path: Path, fault: str, reason: str) -> None:
    timeout_s = 1.0 if fault == "hang" else 30.0
    mine = function(tmp_path, on_failure="value", failure_value=-1.0, timeout_s=timeout_s)
    result = evaluated(["a", "bb", fault, "dddd", "eeeee"], mine)
    assert result.total.tolist() == [1.0, 2.0, -1.0, 4.0, 5.0]
    assert result.failed["mine"].tolist() == [False, False, True, False, False]
    assert not result.dropped.any()
    assert [(failure.function, failure.sample) for failure in result.failures] == [("mine", 2)]
    assert re.fullmatch(reason, result.failures[0].reason)
    assert str(result.failures[0]) == f"reward 'mine' {result.failures[0].reason}"


def test_failed_samples_are_dropped_and_their_total_is_no_number(tmp_path: Path) -> None:
    result = evaluated(["raise", "bb", "nan", "dddd"], function(tmp_path, on_failure="drop"))
    assert result.dropped.tolist() == result.failed["mine"].tolist() == [True, False, True, False]
    for column in (result.total, result.by_name["mine"]):
        assert column.isnan().tolist() == [True, False, True, False]
        assert column[~result.dropped].tolist() == [2.0, 4.0]
    assert [failure.sample for failure in result.failures] == [0, 2]


def test_weighted_sum_and_metrics_where_functions_fail_each_in_its_way(tmp_path: Path) -> None:
    texts = ["a", "raise", "ccc", "nan"]
    only_nan = SOURCE.replace('"raise"', '"never"')
    never = "def reward(texts): return [10.0] * len(texts)"
    result = evaluated(
        texts,
        function(tmp_path, "filled", weight=2.0, on_failure="value", failure_value=-3.0),
        function(tmp_path, "dropping", only_nan, weight=0.5, on_failure="drop"),
        function(tmp_path, "sound", never, weight=0.1),
        RewardFunctionConfig(name="right", path="arithmetic", weight=100.0),
    )
    assert result.by_name["filled"].tolist() == [1.0, -3.0, 3.0, -3.0]
    assert result.by_name["dropping"][:3].tolist() == [1.0, 5.0, 3.0]
    assert result.dropped.tolist() == [False, False, False, True]
    # 2 filled + 0.5 dropping + 0.1 * 10 + 100
    torch.testing.assert_close(result.total, torch.tensor([103.5, 97.5, 108.5, math.nan]), equal_nan=True)
    assert [(failure.function, failure.sample) for failure in result.failures] == [
        ("filled", 1),
        ("filled", 3),
        ("dropping", 3),
    ]
    assert reward_metrics(result) == {
        "reward/filled/mean": -0.5,
        "reward/filled/failed": 2,
        "reward/dropping/mean": 3.0,
        "reward/dropping/failed": 1,
        "reward/sound/mean": 10.0,
        "reward/sound/failed": 0,
        "reward/right/mean": 1.0,
        "reward/right/failed": 0,
        "reward/dropped": 1,
    }


@pytest.mark.parametrize(
    ("on_failure", "texts", "reason"),
    [
        ("value", ["raise"] * 3, r"it raised ValueError at .*: bad text on sample 0 \('raise'\); expected a number"),
        ("drop", ["exit", "nan"], r"it ended with exit code 7 instead of returning on sample 0 \('exit'\)"),
    ],
)
def test_a_function_that_fails_on_all_samples_stops_the_run(
    tmp_path: Path, on_failure: str, texts: list[str], reason: str
) -> None:
    mine = function(tmp_path, on_failure=on_failure)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        with pytest.raises(UserError) as error:
            rewards.evaluate(texts, texts, texts)
        expected = rf"reward 'mine' \({mine.path}\) failed on all {len(texts)} samples of a step: {reason}"
        assert re.fullmatch(expected, str(error.value))
        assert not any(process.running for process in rewards._processes["mine"].processes)
        assert rewards.evaluate(["a", "nan"], [""] * 2, [""] * 2).failed["mine"].tolist() == [False, True]


def test_a_function_that_cannot_be_loaded_fails_on_all_samples(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="failed on all 2 samples of a step: it cannot be imported: ModuleNotFoundError"
    ):
        evaluated(["a", "b"], function(tmp_path, source="import no_such_module", on_failure="value"))


def test_a_step_of_which_every_sample_is_dropped_stops_the_run(tmp_path: Path) -> None:
    line = (
        "rewards: all 2 samples of a step are dropped: reward 'mine' failed on 1, reward 'theirs' failed on 1; first, "
    )
    mine = function(tmp_path, on_failure="drop")
    theirs = function(tmp_path, "theirs", SOURCE.replace('"raise"', '"bb"'), on_failure="drop")
    with pytest.raises(UserError, match=f"{line}reward 'mine' raised ValueError"):
        evaluated(["raise", "bb"], mine, theirs)


@pytest.mark.parametrize(
    ("texts", "shares"),
    [
        (["hang", "hang", "a", "a", "a"], [1 / 5, 4 / 5 / 4]),
        (["hang", "hang", "hang", *["a"] * 12], [1 / 8, 7 / 8 / 8, 49 / 64 / 8]),
    ],
)
def test_the_samples_of_a_hanging_call_share_one_more_time_limit(
    tmp_path: Path, texts: list[str], shares: list[float]
) -> None:
    result = evaluated(texts, function(tmp_path, on_failure="value", timeout_s=1.0))
    assert call_sizes(tmp_path)[: len(shares) + 1] == [len(texts)] + [1] * len(shares)
    assert [failure.sample for failure in result.failures[: len(shares)]] == list(range(len(shares)))
    for limit_s, share in zip(limits(result), shares, strict=False):
        assert share - 0.03 < limit_s <= share + 0.0005  # rounded; a kill takes a little of what is shared


def test_after_an_error_samples_have_what_is_left_of_the_call(tmp_path: Path) -> None:
    source = SOURCE.replace(
        'if "nothing" in texts: return None', "if len(texts) > 1: time.sleep(0.8); raise ValueError"
    )
    result = evaluated(["a", "hang", "bb"], function(tmp_path, source=source, on_failure="value", timeout_s=1.6))
    assert result.by_name["mine"].tolist() == [1.0, 0.0, 2.0]
    (limit_s,) = limits(result)
    assert limit_s <= 0.4  # of at most 0.8 s for three, nearly half are for the second: the first takes little


def test_samples_for_which_no_time_is_left_fail_without_a_call(tmp_path: Path) -> None:
    mine = function(tmp_path, on_failure="value", timeout_s=0.02)
    texts = ["hang", "a", "bb"]
    process, scoring = RewardProcess(mine), Scoring(mine, RewardInputs(texts, texts, texts))
    try:
        Worker(ProcessPool([process]), scoring).run()
    finally:
        process.close()
    assert scoring.failures == {
        0: "did not return the reward of sample 0 ('hang') within 0.01 s and was killed",
        1: "had no time left for sample 1 alone after it did not return the rewards of 3 samples within 0.02 s and "
        "was killed",
        2: "had no time left for sample 2 alone after it did not return the rewards of 3 samples within 0.02 s and "
        "was killed",
    }


def test_imports_of_a_worker_within_a_step_have_one_limit(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    source = f"{SOURCE}\nif Path({str(marker)!r}).exists(): time.sleep(600)"
    mine = function(tmp_path, source=source, on_failure="value", workers=2, load_timeout_s=2.0)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        rewards.load()
        marker.touch()
        result = rewards.evaluate(["a", "exit", "ccc", "dddd"], [""] * 4, [""] * 4)
    assert result.by_name["mine"].tolist() == [0.0, 0.0, 3.0, 4.0]
    first, second = (failure.reason for failure in result.failures)
    assert first == "did not finish its import within 2 s and was killed"
    assert second == "had no time left to be imported again for sample 1"


def test_a_process_that_died_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    mine = function(tmp_path, on_failure="value", workers=2)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        rewards.load()
        before = [process._process.pid for process in rewards._processes["mine"].processes]  # type: ignore[union-attr]
        result = rewards.evaluate(["kill", "pid", "aaaa", "aaaa"], [""] * 4, [""] * 4)
        after = [process._process.pid for process in rewards._processes["mine"].processes]  # type: ignore[union-attr]
        assert len(set(before) & set(after)) == 1
        assert result.by_name["mine"][1] > 0
        assert result.by_name["mine"][2:].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("samples", "workers", "batch_size", "sizes"),
    [
        (5, 1, None, [5]),
        (5, 2, None, [3, 2]),
        (5, 1, 2, [2, 2, 1]),
        (5, 2, 100, [3, 2]),
        (5, 2, 1, [1] * 5),
        (2, 8, None, [1, 1]),
        (0, 2, None, []),
    ],
)
def test_every_sample_is_in_one_call(samples: int, workers: int, batch_size: int | None, sizes: list[int]) -> None:
    calls = split_calls(samples, workers, batch_size)
    assert [len(call) for call in calls] == sizes
    assert [sample for call in calls for sample in call] == list(range(samples))


def test_calls_are_as_large_as_asked_for_and_the_order_of_results_is_kept(tmp_path: Path) -> None:
    texts = ["x" * (length + 1) for length in range(9)]
    mine = function(tmp_path, batch_size=2)
    assert evaluated(texts, mine).total.tolist() == list(range(1, 10))
    assert call_sizes(tmp_path) == [2, 2, 2, 2, 1]
    (tmp_path / "mine.log").unlink()
    mine = function(tmp_path, batch_size=2, workers=3, on_failure="value")
    texts[4] = "raise"
    assert evaluated(texts, mine).total.tolist() == [1, 2, 3, 4, 0, 6, 7, 8, 9]
    assert sorted(call_sizes(tmp_path)) == [1, 1, 1, 2, 2, 2, 2]


def test_every_call_has_the_prompts_and_answers_of_its_samples(tmp_path: Path) -> None:
    source = """
def reward(texts, prompts, answers):
    if "alone" in texts and len(texts) > 1: raise ValueError
    return [int(text == "alone") + int(p) + 10 * int(a) for text, p, a in zip(texts, prompts, answers, strict=True)]
"""
    mine = function(tmp_path, source=source, batch_size=2, on_failure="drop")
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        result = rewards.evaluate(["", "", "alone", "", ""], list("12345"), list("67890"))
    assert result.total.tolist() == [61.0, 72.0, 84.0, 94.0, 5.0]
    assert not result.failures


def test_an_empty_batch_has_no_rewards(tmp_path: Path) -> None:
    result = evaluated([], function(tmp_path, on_failure="drop"))
    assert result.total.shape == result.dropped.shape == result.failed["mine"].shape == (0,)


def test_a_failure_that_stops_names_the_sample_of_the_step_and_ends_other_workers(tmp_path: Path) -> None:
    mine = function(tmp_path, batch_size=2, workers=2, timeout_s=600)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"raised ValueError .* bad text on sample 3 \('raise'\); expected 2 numbers"):
        evaluated(["hang", "a", "b", "raise"], mine)
    with pytest.raises(UserError, match=r"returned nan \(float\) for sample 3 \('nan'\), expected a finite number"):
        evaluated(["a", "hang", "b", "nan"], mine)
    assert time.monotonic() - started < 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "m:f", "workers": 0}, "workers"),
        ({"path": "m:f", "batch_size": 0}, "batch_size"),
        ({"path": "m:f", "on_failure": "ignore"}, "on_failure"),
        ({"path": "arithmetic", "workers": 2}, "workers 2 and batch_size None with 'arithmetic'"),
        ({"path": "arithmetic", "batch_size": 2}, "workers 1 and batch_size 2 with 'arithmetic'"),
        ({"path": "m:f", "failure_value": 1.0}, "failure_value 1 with on_failure 'stop', which does not use it"),
    ],
)
def test_settings_of_failures_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunctionConfig.model_validate({"name": "mine", **settings})


def test_a_failure_is_one_line() -> None:
    assert str(RewardFailure("mine", 3, "raised ValueError")) == "reward 'mine' raised ValueError"


def test_a_function_for_lists_of_messages_is_told_that_it_gets_texts(tmp_path: Path) -> None:
    source = "def reward(completions, **fields):\n    return [len(each[0]['content']) for each in completions]\n"
    line = r"it gets texts, not messages as of TRL: completion in place of completion\[0\]\['content'\]"
    with pytest.raises(UserError, match=line):
        evaluated(["a", "bb"], function(tmp_path, source=source))
