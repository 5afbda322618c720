"""Functions' own metrics, retries of functions, and classes in place of functions."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.processes.function_process import RewardError, check_metrics
from hybridflow.rewards.result import by_sample, join_results, of_samples, reward_metrics
from tests.hybridflow.rewards.test_failures import evaluated, function

WITH_FIGURES = """
def reward(texts):
    rewards = [float("nan") if text == "fail" else len(text) for text in texts]
    words = [None if text == "fail" else len(text.split()) for text in texts]
    return {"rewards": rewards, "metrics": {"words": words}, "counts": {"calls": [1] * len(texts)}}
"""


@pytest.mark.processes
def test_metrics_have_mean_and_percentile_and_counts_their_sum(tmp_path: Path) -> None:
    mine = function(tmp_path, source=WITH_FIGURES, on_failure="drop", workers=2)
    result = evaluated(["a b c", "fail", "d", "e f"], mine)
    assert result.by_name["mine"].tolist()[::2] == [5.0, 1.0]
    assert result.metrics["mine/words"].tolist()[::2] == [3.0, 1.0] and result.metrics["mine/words"][1].isnan()
    values = reward_metrics(result, group="cost")
    assert values["cost/mine/words"] == 2.0 and values["cost/mine/words_p95"] == pytest.approx(2.9)
    assert values["cost/mine/calls"] == 4.0  # of the sample without a reward too
    one_by_one = by_sample(result)
    assert one_by_one[1].metrics == {} and one_by_one[1].counts == {"mine/calls": 1.0}
    again = of_samples(one_by_one, [mine])
    assert reward_metrics(again, group="cost") == values
    assert join_results([result, again]).counts["mine/calls"].tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ([1], "returned metrics [1] (list), expected lists by name, at most 32"),
        ({f"name{number}": [1] for number in range(33)}, "at most 32"),
        ({"mean": [1]}, "returned metrics named 'mean' (str), expected letters, digits and _, and not mean or failed"),
        ({"a/b": [1]}, "returned metrics named 'a/b' (str)"),
        ({"a": [1, 2]}, "returned metrics 'a' [1, 2] (list), expected a number or None for each of 1 texts"),
        ({"a": [float("nan")]}, "returned metrics 'a' [nan] (list)"),
        ({"a": ["1"]}, "returned metrics 'a' ['1'] (list)"),
        ({"a": [10**400]}, "returned metrics 'a' [1000"),
    ],
)
def test_invalid_metrics_are_one_line(metrics: Any, line: str) -> None:
    with pytest.raises(RewardError, match=re.escape(line)):
        check_metrics("metrics", metrics, 1)


@pytest.mark.processes
def test_a_dictionary_without_rewards_is_a_failure(tmp_path: Path) -> None:
    mine = function(tmp_path, source="def reward(texts): return {'values': [1.0] * len(texts)}")
    with pytest.raises(
        UserError, match=r"returned a dictionary of \['values'\] \(list\), expected 'rewards', and if any 'metrics'"
    ):
        evaluated(["a"], mine)


FLAKY = """
from pathlib import Path
LOG = Path(__file__).with_suffix(".log")
def reward(texts):
    with LOG.open("a") as log: log.write(" ".join(texts) + "\\n")
    before = LOG.read_text().split()
    rewards = [float("nan") if text[0] == "n" and before.count(text) < 3 else 1.0 for text in texts]
    if "raise" in texts and before.count("raise") < 2: raise ConnectionError("a moment's")
    last = [before.count(texts[0])] * len(texts)
    return {"rewards": rewards, "counts": {"calls": [1] * len(texts)}, "metrics": {"last": last}}
"""


@pytest.mark.processes
def test_samples_without_a_reward_are_tried_again_after_a_wait(tmp_path: Path) -> None:
    started = time.monotonic()
    result = evaluated(["a", "n", "b"], function(tmp_path, source=FLAKY, retries=2, backoff_s=0.2))
    assert result.total.tolist() == [1.0, 1.0, 1.0] and not result.failures
    assert (tmp_path / "mine.log").read_text().splitlines() == ["a n b", "n", "n"]
    assert time.monotonic() - started >= 0.1 + 0.2  # half of each wait
    assert result.counts["mine/calls"].tolist() == [1, 3, 1] and result.metrics["mine/last"].tolist() == [1, 3, 1]


@pytest.mark.processes
def test_a_whole_call_is_tried_again_and_its_last_failure_counts(tmp_path: Path) -> None:
    stops: dict[str, Any] = {"source": FLAKY, "on_failure": "stop", "backoff_s": 0.01}
    assert evaluated(["raise", "a"], function(tmp_path, retries=1, **stops)).total.tolist() == [1.0, 1.0]
    (tmp_path / "mine.log").unlink()
    with pytest.raises(UserError, match=r"returned nan \(float\) for sample 1 \('n'\), expected a finite number"):
        evaluated(["a", "n"], function(tmp_path, retries=1, **stops))


def test_retries_are_in_the_limit_of_a_step() -> None:
    mine = RewardFunctionConfig(name="mine", path="m:f", timeout_s=10, load_timeout_s=5, retries=2, backoff_s=4)
    assert mine.waits_s == [4, 8] and mine.limit_s(7) == 3 * 2 * 10 + 4 + 8 + 5
    assert mine.model_copy(update={"retries": 10}).waits_s[-1] == 60
    with pytest.raises(
        ValueError, match="retries 1 with 'arithmetic', which has no failures that may pass; expected 0"
    ):
        RewardFunctionConfig(name="mine", path="arithmetic", retries=1)


CLASS = """
class Scorer:
    def __init__(self, *, bonus):
        if bonus < 0: raise ValueError(f"bonus={bonus}, expected at least 0")
        self.bonus, self.calls = bonus, 0
    def __call__(self, texts, answers):
        self.calls += 1
        return [self.bonus + self.calls + (text == answer) for text, answer in zip(texts, answers)]
"""


@pytest.mark.processes
def test_a_class_is_made_once_and_its_instance_called(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CLASS)

    def config(**arguments: Any) -> RewardConfig:
        scorer = {"name": "own", "path": f"{tmp_path}/own.py:Scorer", "arguments": arguments}
        return RewardConfig.model_validate({"functions": [scorer]})

    with RewardFunctions(config(bonus=10)) as rewards:
        assert rewards.evaluate(["a"], [""], ["a"]).total.tolist() == [12.0]
        assert rewards.evaluate(["a"], [""], ["b"]).total.tolist() == [12.0]
    for arguments, line in (({"bonus": -1}, "bonus=-1, expected at least 0"), ({}, "missing 1 required keyword-only")):
        with RewardFunctions(config(**arguments)) as rewards, pytest.raises(UserError, match=line) as error:
            rewards.load()
        assert "reward 'own'" in str(error.value) and "cannot be made with its arguments: " in str(error.value)


@pytest.mark.parametrize("path", ["matches", "length_limit", "script", "http", "judge"])
def test_a_function_of_ours_without_the_arguments_that_it_needs_is_refused_with_the_recipe(path: str) -> None:
    with pytest.raises(ValueError, match=rf"arguments of '{path}': .*([Mm]issing|Field required)"):
        RewardConfig.model_validate({"functions": [{"name": "form", "path": path}]})
