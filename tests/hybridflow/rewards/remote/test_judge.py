"""The reward `judge` against a real HTTP server that answers as an OpenAI-compatible endpoint does."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.remote.judge import Judge
from hybridflow.rewards.result import reward_metrics
from tests.support.scripted_server import ReceivedRequest, Reply, completion, serving

QUICK = {"model": "judge-1", "backoff_s": 0.01, "request_timeout_s": 5.0}
RUBRIC = "Question: {{ prompt }} Response: {{ response }} Right: {{ answer }}"
RANGE = {"rubric": RUBRIC, "score_range": [1, 5]}
SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string"}, "grade": {"enum": ["good", "bad"]}},
    "required": ["why", "grade"],
}


def scored_by(**score: Any) -> dict[str, Any]:
    """The argument that asks for a text and for such a score."""
    properties = {"why": {"type": "string"}, "score": score}
    return {"json_schema": {"type": "object", "properties": properties, "required": ["why", "score"]}}


def by_length(received: ReceivedRequest) -> Any:
    """A verdict: the length of the response."""
    text = re.search(r"Response: (\w*)", received.content["messages"][-1]["content"])
    assert text is not None
    return completion(json.dumps({"score": len(text[1])}), tokens=(20, 3))


def judged(judge: Judge, texts: list[str], timeout_s: float = 20.0) -> dict[str, Any]:
    assert judge.prepare(()) == ["answers", "prompts"]
    rows = [str(number) for number in range(len(texts))]
    return judge(texts, timeout_s=timeout_s, prompts=["p"] * len(rows), answers=["a"] * len(rows))


def reason_of(url: str, **arguments: Any) -> str:
    [reason] = judged(Judge(url=url, **QUICK, **{**RANGE, **arguments}), ["xx"])["rewards"]
    assert isinstance(reason, Exception)
    return str(reason)


def test_scores_of_a_range_and_what_they_cost() -> None:
    with serving(by_length) as server:
        judge = Judge(url=f"{server.url}/v1/", in_flight=1, price={"input": 2, "output": 10}, **QUICK, **RANGE)
        result = judged(judge, ["x", "xxx", "xxxxx"])
        body = server.requests[0].content
        assert {received.path for received in server.requests} == {"/v1/chat/completions"}
    assert result["rewards"] == [0.0, 0.5, 1.0]
    assert body["messages"] == [{"role": "user", "content": "Question: p Response: x Right: a"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-1", 0.0, 1024)
    form = body["response_format"]["json_schema"]
    assert form["schema"]["properties"] == {"score": {"type": "number", "minimum": 1.0, "maximum": 5.0}}
    counts = {name: sum(values) for name, values in result["counts"].items()}
    cost = counts.pop("cost")
    assert counts == {
        **{"requests": 3, "retries": 0, "malformed": 0, "cache_hits": 0},
        **{"input_tokens": 60, "output_tokens": 9},
    }
    assert cost == pytest.approx((60 * 2 + 9 * 10) / 1e6)
    assert all(0 < value < 5 for value in result["metrics"]["latency_s"])


def test_choices_by_a_schema_and_a_system_message() -> None:
    verdicts = iter(["good", "bad"])
    with serving(lambda _: completion(json.dumps({"why": "so", "grade": next(verdicts)}))) as server:
        arguments = {"choices": {"good": 1, "bad": -1}, "score_field": "grade", "json_schema": SCHEMA, "in_flight": 1}
        judge = Judge(url=server.url, rubric=RUBRIC, system="Be fair.", body={"seed": 7}, **QUICK, **arguments)
        assert judged(judge, ["x", "y"])["rewards"] == [1, -1]
        body = server.requests[0].content
    assert [message["role"] for message in body["messages"]] == ["system", "user"] and body["seed"] == 7
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_a_generative_reward_model_writes_its_verdict_at_the_end() -> None:
    said = iter(
        ["Score: 1? No. It is better than that.\nScore: 4", "I like it. Score: 9", "Score: 2", "no idea", "Score: 5"]
    )
    with serving(lambda _: completion(next(said))) as server:
        judge = Judge(url=server.url, pattern=r"Score: (\d+)", in_flight=1, max_tokens=None, **QUICK, **RANGE)
        result = judged(judge, ["x", "y", "z"])
        assert not {"response_format", "max_tokens"} & server.requests[0].content.keys()
    assert result["rewards"] == [0.75, 0.25, 1.0]
    assert result["counts"]["malformed"] == [0, 1, 1]
    with serving(lambda _: completion("my verdict: [[A]]")) as server:
        judge = Judge(url=server.url, rubric=RUBRIC, pattern=r"\[\[([AB])\]\]", choices={"A": 1, "B": 0}, **QUICK)
        assert judged(judge, ["x"])["rewards"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (completion("fine!"), "gave no verdict, 3 times; the last: 'fine!' is no JSON"),
        (
            completion('{"score": 6}'),
            """the last: '{"score": 6}' is not of the schema: 6 is greater than the maximum of 5""",
        ),
        (completion('{"score": NaN}'), "nan is no number of 1 to 5"),
        (completion('{"score": "4"}'), "is not of the schema: '4' is not of type 'number'"),
        (completion('{"score": true}'), "is not of the schema: True is not of type 'number'"),
        (completion("{}"), "is not of the schema: 'score' is a required property"),
        (completion('{"score": 4', finish_reason="length"), "it was cut off after 5 tokens (max_tokens)"),
        (completion(None), "it has no text"),
    ],
)
def test_a_malformed_verdict_is_asked_again_and_is_no_reward(answer: Any, line: str) -> None:
    with serving(lambda _: answer) as server:
        reason = reason_of(server.url)
        assert reason.startswith(f"{server.url}/chat/completions gave no verdict, 3 times") and line in reason
        assert len(server.requests) == 3
        assert "3 times" not in reason_of(server.url, verdict_retries=0)


@pytest.mark.parametrize("answer", [{"choices": []}, [1], "text", {"error": "x"}, {"choices": [{"message": "x"}]}])
def test_what_is_no_chat_completion_is_a_failure_at_once(answer: Any) -> None:
    with serving(lambda _: Reply(json.dumps(answer))) as server:
        assert reason_of(server.url).endswith("expected a chat completion")
        assert len(server.requests) == 1


def test_tokens_that_are_no_number_are_no_verdict_and_no_crash() -> None:
    answer = json.dumps(completion('{"score": 4}')).replace('"prompt_tokens": 10', '"prompt_tokens": 1e999')
    with serving(lambda _: Reply(answer)) as server:
        assert reason_of(server.url).endswith("expected a chat completion")


def test_a_wrong_key_is_told_once_for_each_sample_and_a_busy_server_asked_again() -> None:
    with serving(lambda _: Reply({"error": {"message": "Incorrect API key"}}, 401)) as server:
        assert "status 401" in reason_of(server.url) and len(server.requests) == 1
    number = itertools.count()
    with serving(lambda received: Reply("busy", 503) if next(number) < 2 else by_length(received)) as server:
        result = judged(Judge(url=server.url, **QUICK, **RANGE), ["xxx"])
    assert result["rewards"] == [0.5] and result["counts"]["retries"] == [2] and result["counts"]["requests"] == [3]


def test_samples_without_a_verdict_in_time_fail_and_the_others_keep_theirs() -> None:
    def answer(received: ReceivedRequest) -> Reply:
        late = "Response: xxxxx" in received.content["messages"][-1]["content"]
        return Reply(by_length(received).copy(), after_s=8.0 if late else 0.0)

    with serving(answer) as server:
        good, late = judged(Judge(url=server.url, **QUICK, **RANGE), ["xxx", "xxxxx"], timeout_s=1.5)["rewards"]
        assert good == 0.5
        assert str(late) == f"{server.url}/chat/completions gave no verdict within 1.5 s (timeout_s)"


def test_the_same_is_asked_once(tmp_path: Path) -> None:
    with serving(lambda received: Reply(by_length(received), after_s=0.05)) as server:
        kept = {"cache_dir": str(tmp_path / "kept"), "cache_entries": 2}
        judge = Judge(url=server.url, **QUICK, **RANGE, **kept)
        result = judged(judge, ["x", "x", "xx"])
        assert result["rewards"] == [0, 0, 0.25] and result["counts"]["cache_hits"] == [0, 1, 0]
        assert judged(judge, ["xx"])["counts"]["cache_hits"] == [1] and len(server.requests) == 2
        other_process = Judge(url=server.url, **QUICK, **RANGE, **kept)
        assert judged(other_process, ["x", "xx"])["counts"]["requests"] == [0, 0]
        another_scale = Judge(url=server.url, **QUICK, rubric=RUBRIC, score_range=[0, 4], **kept)
        assert judged(another_scale, ["x"])["rewards"] == [0.25] and len(server.requests) == 3
        assert judged(Judge(url=server.url, **QUICK, **RANGE, **kept), ["xxx"])["rewards"] == [0.5]
        with sqlite3.connect(tmp_path / "kept" / "verdicts.sqlite") as file:
            assert file.execute("SELECT count(*) FROM verdicts").fetchone() == (2,)
        for ends, score in (([0, 10], 0.3), ([0, 5], 0.6)):  # of which the request says nothing
            written = Judge(url=server.url, **QUICK, rubric=RUBRIC, pattern=r"\d", score_range=ends, **kept)
            assert judged(written, ["xxx"])["rewards"] == [pytest.approx(score)]
        without = Judge(url=server.url, **QUICK, **RANGE, cache_entries=0)
        before = len(server.requests)
        judged(without, ["x", "x"])
        assert len(server.requests) == before + 2


def test_failures_are_not_kept() -> None:
    answers: Iterator[Any] = iter([Reply("no", 400), by_length])
    with serving(lambda received: reply if isinstance(reply := next(answers), Reply) else reply(received)) as server:
        judge = Judge(url=server.url, **QUICK, **RANGE)
        assert isinstance(judged(judge, ["xxx"])["rewards"][0], Exception)
        assert judged(judge, ["xxx"])["rewards"] == [0.5]


def test_a_text_is_no_template() -> None:
    with serving(by_length) as server:
        judged(Judge(url=server.url, **QUICK, **RANGE), ["{{ answer.__class__ }}"])
        assert "{{ answer.__class__ }}" in server.requests[0].content["messages"][0]["content"]
        rubric = RUBRIC + "{{ response.__class__.__mro__ }}"
        reason = reason_of(server.url, rubric=rubric)
    assert reason.startswith("had a rubric that could not be filled in: SecurityError: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"rubric": "{{ response"}, "rubric: no template in line 1: unexpected end of template"),
        ({"rubric": "How good?"}, "rubric: asks for no {{ response }}, expected it to"),
        ({"rubrik": RUBRIC}, "rubrik: no such argument, expected of url, api_key_variable, "),
        ({"score_range": None}, "expected one of score_range, such as [1, 10], and choices"),
        ({"choices": {"a": 1, "b": 0}}, "expected one of score_range"),
        ({"score_range": [5, 1]}, "score_range: [5.0, 1.0], expected the lower end first"),
        ({"score_range": None, "choices": {"a": 1}}, "choices: {'a': 1.0}, expected at least two"),
        (
            {"json_schema": {"type": "objekt"}},
            "json_schema: type: 'objekt' is not valid under any of the given schemas",
        ),
        (
            {"json_schema": {"type": "object"}},
            "json_schema: expected type object, with score_field 'score' in properties",
        ),
        ({"pattern": "("}, "pattern: '(' is no regular expression"),
        ({"pattern": "a", "json_schema": {}}, "pattern and json_schema, expected one of them"),
        ({"pattern": "a", "score_field": "score"}, "pattern and score_field, which is of a JSON object; expected one"),
        ({"cache_dir": "kept", "cache_entries": 0}, "cache_dir with cache_entries=0, which keeps none; expected some"),
        (scored_by(type="string"), "json_schema: 'score' is a string, expected a number"),
        (
            {"score_range": None, "choices": {"a": 1, "b": 0}, **scored_by(type=["number", "null"])},
            "json_schema: 'score' is a number or null, expected a string",
        ),
        (
            {"json_schema": {"type": "object", "properties": {"score": {"$ref": "#/nope"}}, "required": ["score"]}},
            "json_schema: PointerToNowhere: '/nope'",
        ),
        (scored_by(**{"$ref": "#/nope"}), "json_schema: PointerToNowhere: '/nope'"),  # behind another field
        ({"body": {"messages": []}}, "body: has 'messages', which is set otherwise"),
        ({"url": "judge.example/v1"}, "url: 'judge.example/v1', expected http://HOST"),
        ({"price": {"input": 1}}, "price.output: Field required"),
    ],
)
def test_arguments_are_checked_with_the_recipe(arguments: dict[str, Any], line: str) -> None:
    given = {"url": "http://judge/v1", "model": "judge-1", **RANGE, **arguments}
    with pytest.raises(ValueError, match=re.escape(line)):
        RewardConfig.model_validate({"functions": [{"name": "quality", "path": "judge", "arguments": given}]})


@pytest.mark.processes
def test_in_a_run_the_rubric_has_the_fields_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    with serving(by_length) as server:
        arguments = {"url": server.url, **QUICK, **RANGE, "rubric": RUBRIC + " Level: {{ level }}"}
        arguments |= {"api_key_variable": "JUDGE_KEY"}
        function = {"name": "quality", "path": "judge", "environment": ["JUDGE_KEY"], "arguments": arguments}
        config = RewardConfig.model_validate({"functions": [function | {"on_failure": "drop"}]})
        with RewardFunctions(config, ["level", "unused"]) as rewards:
            result = rewards.evaluate(["xxx", "xxxxxx"], ["p", "q"], ["1", "2"], {"level": [3, 4], "unused": [0, 0]})
        received = server.requests[0]
        with RewardFunctions(config, ["levle"]) as rewards, pytest.raises(UserError) as error:
            rewards.load()
    assert str(error.value) == (
        "reward 'quality' (judge) cannot be prepared: the rubric asks for 'level', expected of prompt, answer, "
        "response, levle"
    )
    assert received.headers["Authorization"] == "Bearer sk-1"
    assert re.fullmatch(r"Question: \w Response: x+ Right: \d Level: [34]", received.content["messages"][0]["content"])
    assert result.total[0] == 0.5 and result.dropped.tolist() == [False, True]
    values = reward_metrics(result)
    assert (values["reward/quality/malformed"], values["reward/quality/requests"]) == (3, 4)
    assert values["reward/quality/input_tokens"] == 80 and values["reward/quality/failed"] == 1
    assert values["reward/quality/latency_s_p95"] > 0 and "reward/quality/cost" not in values


def test_several_servers_share_the_requests_and_do_those_of_one_that_is_gone() -> None:
    with serving(by_length) as first, serving(by_length) as second:
        urls = [f"{first.url}/v1", f"{second.url}/v1"]
        assert judged(Judge(url=urls, **QUICK, **RANGE), ["x" * 5] * 1 + ["xxx"] * 1)["rewards"] == [1.0, 0.5]
        assert len(first.requests) == len(second.requests) == 1
    with serving(by_length) as alone:
        urls = ["http://127.0.0.1:9/v1", f"{alone.url}/v1"]
        result = judged(Judge(url=urls, **QUICK, **RANGE), ["x", "xxx", "xxxxx"])
        assert result["rewards"] == [0.0, 0.5, 1.0] and len(alone.requests) == 3
        assert 1 <= sum(result["counts"]["retries"]) <= 2  # one that has just failed is not asked again at once
    with pytest.raises(ValueError, match="expected at least one, each once"):
        Judge(url=[], **QUICK, **RANGE)


def test_fields_of_the_data_may_have_the_names_of_what_the_rubric_gets() -> None:
    """A file with the columns prompt, answer and level."""
    judge = Judge(rubric=RUBRIC + "{{ level }}", score_range=[1, 5])
    assert judge.prepare(("prompt", "answer", "level")) == ["answers", "level", "prompts"]


def test_without_a_url_it_is_the_recipes() -> None:
    judge = Judge(**RANGE)
    assert judge.prepare(()) == ["answers", "prompts"]
    with pytest.raises(ValueError, match="has no url, and the recipe has no judge"):
        judge(["x"], timeout_s=1.0, prompts=["p"], answers=["a"])
