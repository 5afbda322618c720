"""Agents with the public client of OpenAI, unmodified but for its address: what they ask for, and how they fail."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.environments.agents import process as agent_process
from hybridflow.environments.agents.host import AgentHost, agent_template
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeClose, EpisodeStart, EpisodeTurn
from tests.support.runs import ROOT

pytestmark = pytest.mark.slow

TOOLS = ROOT / "launch/recipes/data/tools.jinja"
SOURCE = """
import asyncio, json, os, time, urllib.request
import openai

def user(text):
    return {"role": "user", "content": text}

def post(base_url, api_key, content):
    url = base_url.removesuffix("/v1") + "/reward"
    headers = {"Authorization": f"Bearer {api_key}"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(content).encode(), headers), timeout=30)

async def play(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        chat = client.chat.completions.create
        messages = [user(task.prompt)]
        match task.answer:
            case "two":
                for _ in range(2):
                    completion = await chat(model="gpt", messages=messages)
                    messages += [completion.choices[0].message, user("+")]
                return len(completion.choices[0].message.content)
            case "branch":
                first = (await chat(model="gpt", messages=messages)).choices[0].message
                for hint in "+-":
                    await chat(model="gpt", messages=[*messages, first, user(hint)])
                await chat(model="gpt", messages=[user("other")])
            case "stream":
                stream = await chat(
                    model="gpt", messages=messages, stream=True, stream_options={"include_usage": True}
                )
                text, usage = "", None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                completion = await client.completions.create(model="gpt", prompt="1", max_tokens=2)
                assert [model.id async for model in client.models.list()] == ["policy"]
                return 100 * len(text) + 10 * usage.completion_tokens + completion.usage.prompt_tokens
            case "retry":
                impatient = client.with_options(timeout=1.0, max_retries=9)
                completion = await impatient.chat.completions.create(model="gpt", messages=messages)
                await chat(model="gpt", messages=[*messages, completion.choices[0].message, user("+")])
            case "impatient":
                try:
                    await client.with_options(timeout=1.0).chat.completions.create(model="gpt", messages=messages)
                except openai.APITimeoutError:
                    await chat(model="gpt", messages=[user("+")])
            case "paid":
                post(base_url, api_key, {"reward": 4.0})
                await chat(model="gpt", messages=messages)
                post(base_url, api_key, {"reward": 2.0})
                await chat(model="gpt", messages=[user("+")])
                await chat(model="gpt", messages=[user("-")])
            case "options":
                errors = 0
                for options in ({"temperature": 0.2}, {"logprobs": True}, {"n": 2}, {"extra_body": {"foo": 1}}):
                    try:
                        await chat(model="gpt", messages=messages, **options)
                    except openai.BadRequestError as error:
                        errors += error.param == next(iter(options.get("extra_body", options)))
                    else:
                        raise AssertionError(options)
                for wrong in ([-1], [10**9], [[1], [2]]):
                    try:
                        await client.completions.create(model="gpt", prompt=wrong)
                    except openai.BadRequestError as error:
                        assert "prompt: " in str(error), error
                    else:
                        raise AssertionError(wrong)
                # Ignored ones have no effect, also where others would be served.
                await chat(
                    model="gpt", messages=messages, temperature=1.0, top_p=1, seed=3, user="me", stream=False,
                    max_completion_tokens=1,
                )
                return errors
            case "stranger":
                for url, key in ((base_url, "x"), (base_url.replace("sessions/", "sessions/9"), api_key)):
                    try:
                        await openai.AsyncOpenAI(base_url=url, api_key=key).models.list()
                    except openai.AuthenticationError as error:
                        assert error.code == "invalid_api_key"
                    else:
                        raise AssertionError(url)
                await chat(model="gpt", messages=messages)
                return 1
            case "endless":
                while True:
                    completion = await chat(model="gpt", messages=messages)
                    messages += [completion.choices[0].message, user("+")]
            case "flood":
                while True:
                    try:
                        await chat(model="gpt", messages=[])
                    except openai.BadRequestError:
                        pass
            case "raise": raise ValueError("no such thing")
            case "wait": await asyncio.sleep(1000)
            case "block": time.sleep(1000)
            case "die": os._exit(3)
            case "silent": await chat(model="gpt", messages=messages); return None
            case "nan": await chat(model="gpt", messages=messages); return float("nan")
            case "nothing": return 1.0
        post(base_url, api_key, {"reward": 0.5})
        post(base_url, api_key, {"reward": 1.0})

def blocking(task, base_url, api_key):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        return len(client.chat.completions.create(model="gpt", messages=[user("1")]).choices[0].message.content)

async def with_library(task, base_url, api_key):
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    @function_tool
    def price(article: str) -> str:
        return "42"

    @function_tool
    def stock(article: str) -> str:
        return "7"

    set_tracing_disabled(True)  # it would send what it does to OpenAI
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel("any", client)
        agent = Agent(name="shop", instructions="Sell.", tools=[price, stock], model=model)
        result = await Runner.run(agent, task.prompt)
    return float(result.final_output == task.answer)

async def with_another_argument(task, base_url, api_key, depth): ...
"""
PROGRAM = """
import json, os, sys, urllib.request
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()  # by OPENAI_BASE_URL and OPENAI_API_KEY
client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": task["prompt"]}])
url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(url, b'{"reward": 2}', headers))
sys.exit(int(task["answer"]))
"""


class _Policy:
    """Plays the part of a rollout controller, whose policy says what it is given."""

    def __init__(self, host: AgentHost, tokenizer: PreTrainedTokenizerBase) -> None:
        self.host, self._tokenizer = host, tokenizer
        self.turns = ["42<|end|>"]
        """Texts of the turns of each episode; the last is that of all further ones."""
        self.requested: dict[int, list[EpisodeAnswer]] = {}
        self.ends: dict[int, EpisodeAnswer] = {}

    def play(self, *answers: str, wait_s: float = 0.0, most_tokens: int = 200) -> dict[int, EpisodeAnswer]:
        """The ends of episodes with these answers. `wait_s`: before each turn."""
        first = max(self.requested, default=-1) + 1
        samples = range(first, first + len(answers))
        self.requested |= {sample: [] for sample in samples}
        self.host.send(
            [
                EpisodeStart(sample, Task("1", answer), most_tokens)
                for sample, answer in zip(samples, answers, strict=True)
            ]
        )
        limit = time.monotonic() + 120
        while not set(samples) <= self.ends.keys():
            assert time.monotonic() < limit, self.ends
            for answer in self.host.take_answers(1.0):
                if answer.sequence is None:
                    self.ends[answer.sample] = answer
                    self.host.send([EpisodeClose(answer.sample)])
                    continue
                text = self.turns[min(len(self.requested[answer.sample]), len(self.turns) - 1)]
                self.requested[answer.sample].append(answer)
                time.sleep(wait_s)
                tokens = self._tokenizer.encode(text)
                turn = tokens[: answer.limit]
                self.host.send([EpisodeTurn(answer.sample, turn, complete=turn == tokens)])
        return {sample - first: self.ends[sample] for sample in samples}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def policy_of(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Callable[..., _Policy]]:
    directory = tmp_path_factory.mktemp("agents")
    (directory / "players.py").write_text(SOURCE)
    (directory / "program.py").write_text(PROGRAM)
    hosts: list[AgentHost] = []

    def make(agent: str | Sequence[str] = "play", *, chat: ChatConfig | None = None, **settings: Any) -> _Policy:
        if isinstance(agent, str):
            agent = f"{directory}/players.py:{agent}"
        else:
            agent = [word.replace("DIRECTORY", str(directory)) for word in agent]
        config = EnvironmentConfig(**{"agent": agent, "workers": 1, **settings})
        hosts.append(AgentHost(config, tokenizer, agent_template(chat, tokenizer), {"temperature": 1.0, "top_p": 1.0}))
        hosts[-1].start()
        return _Policy(hosts[-1], tokenizer)

    yield make
    for host in hosts:
        host.close()


@pytest.fixture(scope="module")
def policy(policy_of: Callable[..., _Policy]) -> _Policy:
    return policy_of(ignored_options=("seed", "max_completion_tokens"), max_turns=4)


def test_requests_of_a_session_are_one_sequence_of_tokens(policy: _Policy, tokenizer: PreTrainedTokenizerBase) -> None:
    end = policy.play("two")[0]
    assert (end.reward, end.done, end.failure, end.truncated) == (2.0, True, None, False)
    first, second = policy.requested[max(policy.requested)]
    assert (first.sequence, second.sequence) == (0, 0)
    assert tokenizer.decode(list(first.tokens)) == "<|user|>1<|end|><|assistant|>"
    assert tokenizer.decode(list(second.tokens)) == "<|user|>+<|end|><|assistant|>"
    assert end.counts["requests"] == 2 and not {"branches", "rendered_otherwise"} & end.counts.keys()


def test_a_conversation_that_its_template_renders_otherwise_is_counted_and_logged(
    policy_of: Callable[..., _Policy], capfd: pytest.CaptureFixture[str]
) -> None:
    policy = policy_of(max_turns=4)
    policy.turns = ["4<|user|>2<|end|>"]  # of which the agent sees the text without the special token
    assert policy.play("endless")[0].counts["rendered_otherwise"] == 1
    assert "environment: the text of sample 0, turn 1, is '" in capfd.readouterr().out


def test_conversations_that_diverge_are_branches_of_one_episode(policy: _Policy) -> None:
    end = policy.play("branch")[0]
    assert [answer.sequence for answer in policy.requested[max(policy.requested)]] == [0, 0, 1, 2]
    assert end.reward == 1.5 and end.counts["branches"] == 2  # as it was reported, in two parts


def test_answers_in_events_texts_and_the_list_of_models(policy: _Policy) -> None:
    end = policy.play("stream")[0]
    assert (end.failure, end.reward) == (None, 100 * 2 + 10 * 3 + 1)
    assert [answer.limit for answer in policy.requested[max(policy.requested)]][1] == 2


def test_a_request_that_is_sent_again_gets_the_answer_of_the_first(policy: _Policy) -> None:
    end = policy.play("retry", wait_s=2.5)[0]
    assert end.failure is None
    first, second = policy.requested[max(policy.requested)]
    assert (first.sequence, second.sequence) == (0, 0)
    assert end.counts["requests"] == 2 and end.counts["retries"] >= 1


def test_an_answer_that_its_agent_has_not_waited_for_is_counted(policy: _Policy) -> None:
    end = policy.play("impatient", wait_s=2.5)[0]
    assert (end.failure, end.reward) == (None, 1.5)
    assert (end.counts["requests"], end.counts["undelivered"]) == (2, 1)
    assert "undelivered" not in policy.play("two")[0].counts


def test_a_reward_is_of_the_answer_before_it(policy: _Policy) -> None:
    end = policy.play("paid")[0]
    assert [answer.reward for answer in policy.requested[max(policy.requested)]] == [0.0, 4.0 + 2.0, 0.0]
    assert end.reward == 1.5


def test_options_that_change_what_is_drawn_are_refused_by_name(policy: _Policy) -> None:
    end = policy.play("options")[0]
    assert (end.failure, end.reward) == (None, 4.0)
    assert [answer.limit > 1 for answer in policy.requested[max(policy.requested)]] == [True]


def test_no_session_is_open_to_others(policy: _Policy) -> None:
    assert policy.play("stranger")[0].reward == 1.0


def test_an_agent_that_has_no_turns_or_tokens_left_has_the_reward_that_it_has(policy: _Policy) -> None:
    turns, tokens = policy.play("endless")[0], policy.play("endless", most_tokens=20)[0]
    for end, requests in ((turns, 4), (tokens, 3)):
        assert (end.failure, end.truncated, end.reward) == (None, True, 0.0)
        assert end.counts["requests"] == requests
    requested = policy.requested[max(policy.requested)]
    sent = sum(len(answer.tokens) for answer in requested)
    assert sent + 3 * (len(requested) - 1) + min(3, requested[-1].limit) <= 20


def test_each_failure_is_of_its_episode_alone(policy_of: Callable[..., _Policy]) -> None:
    kinds = ["two", "raise", "flood", "silent", "nan", "nothing"]
    ends = policy_of().play(*kinds)
    assert [ends[number].failure for number in range(len(kinds))] == [
        None, "raised", "flooded", "nonsense", "nonsense", "nonsense",
    ]  # fmt: skip
    assert ends[1].reason.startswith("raised ValueError at ") and ends[1].reason.endswith(": no such thing")
    assert "had 100 requests refused" in ends[2].reason and "list of messages" in ends[2].reason
    assert ends[3].reason.startswith("ended without a reward")
    assert ends[5].reason.startswith("ended without an answer")


def test_an_agent_that_hangs_or_dies_ends(policy_of: Callable[..., _Policy]) -> None:
    policy = policy_of(tool_timeout_s=2.0)
    end = policy.play("wait")[0]
    assert (end.failure, end.reason) == ("timeout", "sent no request for 2 s")
    assert policy.play("die")[0].failure == "died"
    end = policy.play("block")[0]
    assert (end.failure, end.reason) == ("hung", "blocked its process for more than 2 s, which was killed")
    assert any(policy.play("two")[0].reward == 2.0 for _ in range(9))  # a busy machine may need longer than 2 s


def test_an_episode_that_is_closed_before_it_begins_is_not_played(policy: _Policy) -> None:
    policy.host.send([EpisodeStart(10**6, Task("1", "two"), 200), EpisodeClose(10**6)])
    assert policy.play("two")[0].reward == 2.0
    assert not policy.host._server.sessions.keys() & {10**6} and not policy.host._playing.keys() & {10**6}


def test_a_process_ends_itself_whose_functions_do_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    exits, release = list[int](), threading.Event()
    monkeypatch.setattr(agent_process, "_MOST_ABANDONED", 1)
    monkeypatch.setattr(agent_process, "_GRACE_S", 0.0)
    monkeypatch.setattr(os, "_exit", exits.append)

    def play(task: Task, base_url: str, api_key: str) -> None:
        release.wait(100)

    async def abandon(count: int) -> None:
        call = {"method": "play", **asdict(Task("1")), "base_url": "", "api_key": ""}
        calls = [asyncio.create_task(server._called(call)) for _ in range(count)]
        await asyncio.sleep(0.1)
        for task in calls:
            task.cancel()
        await asyncio.wait(calls)
        await asyncio.sleep(0.1)

    server = agent_process.AgentServer(play, cast(asyncio.StreamWriter, None))
    with asyncio.Runner() as runner:
        runner.run(abandon(1))
        assert exits == []
        runner.run(abandon(1))
        assert exits == [1]
        release.set()


def test_a_function_that_is_not_async_plays_in_a_thread(policy_of: Callable[..., _Policy]) -> None:
    ends = policy_of("blocking").play(*["x"] * 20, wait_s=0.01)
    assert {end.reward for end in ends.values()} == {2.0}


def test_an_agent_of_a_public_library_plays_with_two_tools(
    policy_of: Callable[..., _Policy], tokenizer: PreTrainedTokenizerBase
) -> None:
    pytest.importorskip("agents", reason="needs openai-agents of requirements-dev.txt")
    policy = policy_of("with_library", chat=ChatConfig(template=TOOLS), tool_parser="pythonic")
    policy.turns = ['[price(article="ab"), stock(article="ab")]<|end|>', "42<|end|>"]
    end = policy.play("42", most_tokens=500)[0]
    assert (end.failure, end.reward) == (None, 1.0)
    assert {name: end.counts[name] for name in ("requests", "calls_price", "calls_stock")} == {
        "requests": 2, "calls_price": 1, "calls_stock": 1,
    }  # fmt: skip
    first, second = policy.requested[max(policy.requested)]
    assert (first.sequence, second.sequence) == (0, 0)
    assert str(tokenizer.decode(list(first.tokens))).endswith("<|system|>Sell.<|end|><|user|>1<|end|><|assistant|>")
    assert tokenizer.decode(list(second.tokens)) == "<|tool|>42<|end|><|tool|>7<|end|><|assistant|>"


def test_a_program_plays(policy_of: Callable[..., _Policy]) -> None:
    # The process and one program at a time.
    ends = policy_of([sys.executable, "DIRECTORY/program.py"], limits={"processes": 2}).play("0", "3")
    assert (ends[0].failure, ends[0].reward) == (None, 2.0)
    assert ends[1].failure == "raised" and ends[1].reason.endswith(": the program ended with exit code 3")


def test_a_function_that_cannot_play_is_refused(policy_of: Callable[..., _Policy]) -> None:
    with pytest.raises(
        UserError, match=r"^environment.agent \(.*:with_another_argument\) does not take \(task, base_url, api_key\)"
    ):
        policy_of("with_another_argument")
