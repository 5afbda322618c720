"""The reward `http` against a real server: its answers, its failures, and none of these a reward."""

from __future__ import annotations

import itertools
import re
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.remote.endpoint import _retry_after_s
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.remote.http_reward import HttpReward
from hybridflow.rewards.result import by_sample, join_results, of_samples, reward_metrics
from tests.support.scripted_server import ReceivedRequest, Reply, serving

QUICK = {"backoff_s": 0.01, "longest_wait_s": 1.0, "request_timeout_s": 5.0}


def lengths(received: ReceivedRequest) -> list[float]:
    return [len(text) for text in received.content["responses"]]


def scored(url: str, texts: list[str], *, timeout_s: float = 20.0, **arguments: Any) -> dict[str, Any]:
    reward = HttpReward(**{"url": url, "send": [], **QUICK, **arguments})
    assert reward.prepare(()) == tuple(arguments.get("send", ()))
    return reward(texts, timeout_s=timeout_s)


def reason_of(url: str, **arguments: Any) -> str:
    """Why two samples have no reward."""
    result = scored(url, ["a", "bb"], **arguments)
    first, second = map(str, result["rewards"])
    assert first == second and "\n" not in first
    return first


def test_samples_are_posted_in_requests_of_a_size_and_come_back_in_order() -> None:
    texts = ["x" * number for number in range(10)]
    with serving(lambda received: Reply(lengths(received), after_s=0.1)) as server:
        result = scored(server.url, texts, samples_per_request=3, in_flight=2)
        assert result["rewards"] == list(range(10))
        assert sorted(len(received.content["responses"]) for received in server.requests) == [1, 3, 3, 3]
        assert server.most_at_once == 2
    assert sum(value for value in result["counts"]["requests"] if value) == 4
    assert all(0.1 <= value < 10 for value in result["metrics"]["latency_s"])


def test_what_is_sent_beside_and_what_the_server_gives_beside() -> None:
    def answer(received: ReceivedRequest) -> Any:
        assert received.content == {"responses": ["a", "bb"], "answers": ["1", "2"], "level": [3, None]}
        return {
            "rewards": [1, {"error": "no such\nproblem"}],
            "metrics": {"depth": [0.5, None]},
            "counts": {"calls": [1, 2]},
        }

    with serving(answer) as server:
        reward = HttpReward(url=server.url, send=["answers", "level"])
        assert list(reward.prepare(["level"])) == ["answers", "level"]
        result = reward(["a", "bb"], timeout_s=10, answers=["1", "2"], level=[3, None])
    assert result["rewards"][0] == 1 and str(result["rewards"][1]) == "the server says: no such\nproblem"
    assert result["metrics"]["depth"] == [0.5, None] and result["counts"]["calls"] == [1, 2]


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        ([1.0], "answered 1 rewards for 2 responses, expected one for each"),
        (Reply("[1, NaN, 2]"), "answered 3 rewards for 2 responses"),
        ({"scores": [1, 2]}, "answered {'scores': [1, 2]}, expected a list of 2 numbers, or 'rewards'"),
        (Reply("<html>fine</html>"), "answered with status 200: <html>fine</html>, expected JSON"),
        (Reply("[" * 50_000), "expected JSON"),
        (Reply("x" * 200_000), "answered with more than 81920 bytes"),
        (
            {"rewards": [1, 2], "counts": {"calls": [1]}},
            "returned counts 'calls' [1] (list), expected a number or None",
        ),
        (Reply("no\nsuch model", 404), "answered with status 404: no such model"),
        (Reply("", 301, {"Location": "/elsewhere"}), "answered with status 301: nothing"),
    ],
)
def test_a_wrong_answer_is_one_line_at_once_and_no_reward(reply: Any, line: str) -> None:
    with serving(lambda _: reply) as server:
        reason = reason_of(server.url)
        assert reason.startswith(server.url) and line in reason
        assert len(server.requests) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", '"much"', "true", "[1]", '{"error": 3}'])
def test_what_is_no_number_fails_its_sample_alone(value: str) -> None:
    with serving(lambda _: Reply(f"[1.5, {value}]")) as server:
        good, bad = scored(server.url, ["a", "bb"])["rewards"]
    assert good == 1.5 and re.fullmatch(r"the server answered .*, expected a finite number", str(bad))


@pytest.mark.parametrize("fault", [Reply("busy", 503), Reply("slow down", 429), Reply(status=None)])
def test_what_a_moment_may_change_is_tried_again_with_growing_waits(fault: Reply) -> None:
    number = itertools.count()
    with serving(lambda received: fault if next(number) < 3 else lengths(received)) as server:
        result = scored(server.url, ["a", "bb"], backoff_s=0.08)
        times = [received.at for received in server.requests]
    assert result["rewards"] == [1, 2]
    assert result["counts"] == {"requests": [4, None], "retries": [3, None]}
    waits = [after - before for before, after in itertools.pairwise(times)]
    for wait, longest in zip(waits, (0.08, 0.16, 0.32), strict=True):
        assert longest / 2 <= wait


def test_retries_end_and_the_line_says_how_often() -> None:
    with serving(lambda _: Reply("busy", 500)) as server:
        assert reason_of(server.url, retries=2) == f"{server.url} answered with status 500: busy, 3 times"
        assert len(server.requests) == 3


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        assert reason_of(url, retries=1).startswith(f"{url} could not be reached: ConnectError: ")


def test_the_server_says_how_long_to_wait() -> None:
    number = itertools.count()
    first = Reply("later", 429, {"Retry-After": "0.5"})
    with serving(lambda received: first if next(number) == 0 else lengths(received)) as server:
        assert scored(server.url, ["a"])["rewards"] == [1]
        assert server.requests[1].at - server.requests[0].at >= 0.5
    with serving(lambda _: Reply("much later", 429, {"Retry-After": "3600"})) as server:
        line = reason_of(server.url)
        assert line.endswith("much later, and asks to wait 3600 s, longer than longest_wait_s=1")
        assert len(server.requests) == 1
    assert _retry_after_s("soon") == _retry_after_s("") == _retry_after_s("nan") == _retry_after_s("-3") == 0
    assert 50 < _retry_after_s(format_datetime(datetime.now(UTC) + timedelta(minutes=1), usegmt=True)) <= 60


def test_a_server_that_hangs_costs_its_own_samples_alone() -> None:
    def answer(received: ReceivedRequest) -> Reply:
        return Reply(lengths(received), after_s=600.0 if received.content["responses"] == ["hang"] else 0.0)

    with serving(answer) as server:
        started = time.monotonic()
        result = scored(server.url, ["a", "hang", "ccc"], samples_per_request=1, request_timeout_s=1.0, retries=0)
        assert result["rewards"][::2] == [1, 3]
        assert str(result["rewards"][1]) == f"{server.url} did not answer within 1 s (request_timeout_s)"
        result = scored(server.url, ["a", "hang", "ccc"], samples_per_request=1, timeout_s=1.5)
        assert result["rewards"][::2] == [1, 3]
        assert str(result["rewards"][1]) == f"{server.url} did not answer within 1.5 s (timeout_s)"
        assert result["counts"]["requests"] == [1, 1, 1]
        assert time.monotonic() - started < 300


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_KEY", "sk-123456")
    with serving(lambda received: Reply(f"bad key: {received.headers['Authorization']}", 401)) as server:
        line = reason_of(server.url, api_key_variable="SCORE_KEY")
    assert line == f"{server.url} answered with status 401: bad key: Bearer <key>"
    monkeypatch.delenv("SCORE_KEY")
    with pytest.raises(ValueError, match=r"the environment variable SCORE_KEY \(api_key_variable\) is not set"):
        HttpReward(url="http://a/b", api_key_variable="SCORE_KEY").prepare(())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "arguments of 'http': url: Field required"),
        ({"url": "score.example/v1"}, "url: 'score.example/v1', expected http://HOST/... or https://HOST/..."),
        ({"url": "http://:80/x"}, "url: 'http://:80/x', expected http://HOST"),
        ({"url": "http://a:port/x"}, "expected http://HOST"),
        ({"url": "http://me:secret@a/x"}, "url: has a user, a query or a fragment, expected none"),
        ({"url": "http://a", "api_key": "secret"}, "api_key: no such argument, expected of url, api_key_variable, "),
        ({"url": "http://a", "retries": -1}, "retries: Input should be greater than or equal to 0"),
        ({"url": "http://a", "send": ["responses"]}, "send: ['responses'], expected each name once"),
        (
            {"url": "http://a", "api_key_variable": "A_KEY"},
            "'A_KEY' is not in environment, expected environment: [A_KEY]",
        ),
    ],
)
def test_arguments_are_checked_with_the_recipe(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        RewardConfig.model_validate({"functions": [{"name": "far", "path": "http", "arguments": arguments}]})
    assert "secret" not in str(error.value).partition("input_value")[0]


def test_retries_of_the_function_are_refused() -> None:
    function = {"name": "far", "path": "http", "retries": 1, "arguments": {"url": "http://a"}}
    with pytest.raises(ValueError, match=r"retries 1 with 'http', which retries .*: arguments\.retries; expected 0"):
        RewardConfig.model_validate({"functions": [function]})


@pytest.mark.processes
def test_in_a_run_failures_follow_the_policy_and_its_metrics_reach_the_metrics() -> None:
    def answer(received: ReceivedRequest) -> Any:
        if received.content["responses"] == ["refuse"]:
            return Reply("no", 400)
        return {"rewards": lengths(received), "metrics": {"depth": [None] + [2.0] * (len(lengths(received)) - 1)}}

    with serving(answer) as server:
        arguments = {"url": f"{server.url}/score", "samples_per_request": 1, **QUICK}
        far = {"name": "far", "path": "http", "weight": 0.5, "on_failure": "drop", "arguments": arguments}
        config = RewardConfig.model_validate({"functions": [far]})
        with RewardFunctions(config, ["level"]) as rewards:
            texts = ["a", "refuse", "ccc"]
            result = rewards.evaluate(texts, texts, texts, {"level": [1, 2, 3]})
            again = rewards.evaluate(["dddd"], [""], [""], {"level": [1]})
            with pytest.raises(
                UserError, match=r"reward 'far' \(http\) failed on all 1 samples of a step: it gave none"
            ):
                rewards.evaluate(["refuse"], [""], [""], {"level": [1]})
        assert all(received.path == "/score" for received in server.requests)
        unknown = RewardConfig.model_validate(
            {"functions": [far | {"arguments": {"url": server.url, "send": ["levle"]}}]}
        )
        with (
            RewardFunctions(unknown, ["level"]) as rewards,
            pytest.raises(UserError, match="send names 'levle'") as error,
        ):
            rewards.load()
    assert str(error.value).endswith("cannot be prepared: send names 'levle', expected of prompts, answers, level")
    assert result.total[::2].tolist() == [0.5, 1.5] and result.dropped.tolist() == [False, True, False]
    [failure] = result.failures
    assert failure.reason == f"gave none for sample 1 ('refuse'): {server.url}/score answered with status 400: no"
    values = reward_metrics(result)
    assert values["reward/far/requests"] == 3 and values["reward/far/failed"] == 1
    assert 0 < values["reward/far/latency_s"] <= values["reward/far/latency_s_p95"] < 5
    joined = join_results([result, of_samples(by_sample(again), config.functions)])
    assert joined.counts["far/requests"].tolist() == [1, 1, 1, 1]
    assert joined.metrics["far/latency_s"].isnan().tolist() == [False, True, False, False]
