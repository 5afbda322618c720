"""Environments in processes: answers, and failures that are contained."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.environments import process_handle
from hybridflow.environments.config import EnvironmentConfig, ObservationRole
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeClose, EpisodeStart, EpisodeTurn
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens

pytestmark = pytest.mark.processes

SOURCE = """
import asyncio, gc, os, time
from hybridflow.environments.environment import Observation
from hybridflow.rewards.processes.function_process import encode_message

class Echo:
    def __init__(self, length=1):
        self._length = length

    async def reset(self, task):
        self._answer = task.answer
        return Observation("?" * self._length if self._answer != "quiet" else "", done=False)

    async def step(self, turn):
        match self._answer:
            case "raise": raise ValueError("no such thing")
            case "wait": await asyncio.sleep(1000)
            case "stubborn":
                while True:
                    try:
                        await asyncio.sleep(1000)
                    except asyncio.CancelledError:
                        pass
            case "cancel": raise asyncio.CancelledError
            case "block": time.sleep(1000)
            case "compute": time.sleep(0.05)
            case "forge":
                (writer,) = (item for item in gc.get_objects() if isinstance(item, asyncio.StreamWriter))
                writer.write(encode_message({"episode": []}))
            case "die": os._exit(3)
            case "nothing": return None
            case "nan": return Observation(reward=float("nan"))
            case "huge": return Observation(reward=10**400)
            case "farewell": return Observation("not in the vocabulary", reward=2.0, done=True)
            case "flood": return Observation("a" * 1000)
            case "names": return Observation(counts={"turns": 1})
            case "letters": return Observation("not in the vocabulary")
            case "surrogate": return Observation("\\ud800")
            case "answers": return Observation(answers=["1"])
        return Observation(turn.text[::-1], reward=1.5, done=turn.text == "22", counts={"calls": 2})

    async def close(self):
        if self._answer == "note":
            open("closed", "w").close()

class Replayable(Echo):
    replayable = True

class Counting(Replayable):
    async def reset(self, task):
        await super().reset(task)
        return Observation(str(os.getpid()) if self._answer == "well" else "")

class NotAsync:
    def reset(self, task): ...
"""

FORGES = """
import os, stat

for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            os.write(number, b"\\xff" * 4)
    except OSError:
        pass

class Echo: ...
"""


@pytest.fixture
def host_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EpisodeHost]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo.py").write_text(SOURCE)
    tokenizer = make_character_tokenizer("0123456789?a", tmp_path / "tokenizer")
    hosts: list[EpisodeHost] = []

    def make(
        name: str = "Echo", *, starts: bool = True, role: ObservationRole | None = None, **settings: Any
    ) -> EpisodeHost:
        given = {"path": f"echo.py:{name}", "workers": 1, "tool_timeout_s": 0.5, "max_answer_characters": 100}
        hosts.append(EpisodeHost(EnvironmentConfig(**{**given, **settings}), ObservationTokens(tokenizer, role=role)))
        if starts:
            hosts[-1].start()
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def _answers(host: EpisodeHost, count: int) -> dict[int, EpisodeAnswer]:
    answers: dict[int, EpisodeAnswer] = {}
    end = time.monotonic() + 60
    while len(answers) < count and time.monotonic() < end:
        answers |= {answer.sample: answer for answer in host.take_answers(1.0)}
    return answers


def _wait_for_file(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def _step(host: EpisodeHost, *answers: str) -> dict[int, EpisodeAnswer]:
    """Answers to the first turn of an episode for each of these tasks. The turn is "12"."""
    host.send([EpisodeStart(sample, Task("1", answer)) for sample, answer in enumerate(answers)])
    started = _answers(host, len(answers))
    assert [started[sample].failure for sample in range(len(answers))] == [None] * len(answers)
    host.send([EpisodeTurn(sample, [4, 5, 2], complete=True) for sample in range(len(answers))])
    return _answers(host, len(answers))


def test_texts_go_in_and_out_as_tokens(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of(arguments={"length": 3})
    host.send([EpisodeStart(7, Task("1", "say")), EpisodeStart(8, Task("1", "quiet"))])
    started = _answers(host, 2)
    assert started[7].tokens == [13, 13, 13] and started[8].tokens == []
    host.send([EpisodeTurn(7, [4, 5, 2], complete=True), EpisodeTurn(8, [5, 5], complete=True)])
    answers = _answers(host, 2)
    assert (answers[7].tokens, answers[7].reward, answers[7].done) == ([5, 4], 1.5, False)
    assert (answers[8].tokens, answers[8].done, answers[8].counts) == ([], True, {"calls": 2.0})


def test_each_failure_is_of_its_episode_alone(host_of: Callable[..., EpisodeHost]) -> None:
    kinds = {
        "raise": ("raised", r"raised ValueError at .*echo.py:\d+: no such thing"),
        "cancel": ("raised", r"raised CancelledError at .*echo.py:\d+"),
        "wait": ("timeout", "gave no answer within 0.5 s"),
        "stubborn": ("timeout", "gave no answer within 0.5 s"),
        "nothing": ("nonsense", "returned a NoneType, expected an Observation"),
        "nan": ("nonsense", "returned reward=nan, expected a finite number"),
        "huge": ("nonsense", "returned reward=10+, expected a number within the range of float32"),
        "flood": ("nonsense", "returned a text of 1,000 characters, expected at most 100 characters"),
        "letters": ("nonsense", "returned what is no text for the tokenizer: an observation .* cannot be encoded"),
        "names": ("nonsense", "returned counts named 'turns', which is a metric of every episode"),
        "surrogate": ("nonsense", "returned a text with a lone surrogate"),
        "answers": ("nonsense", "returned 1 answers of tools to a turn without calls, expected a text"),
    }
    answers = _step(host_of(), *kinds, "well", "forge", "farewell")
    for sample, (kind, reason) in enumerate(kinds.values()):
        assert answers[sample].failure == kind
        assert re.match(reason, answers[sample].reason), answers[sample].reason
    for sample in (len(kinds), len(kinds) + 1):
        assert answers[sample].failure is None and answers[sample].reward == 1.5
    last = answers[len(kinds) + 2]  # its text is read by nobody
    assert (last.failure, last.tokens, last.reward, last.done) == (None, [], 2.0, True)


def test_a_process_that_dies_takes_its_episodes_and_is_started_again(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of()
    answers = _step(host, "die", "wait")
    assert [answers[sample].failure for sample in (0, 1)] == ["died", "died"]
    assert answers[0].reason == "ended with exit code 3"
    assert _step(host, "well")[0].reward == 1.5


@pytest.mark.parametrize(
    ("name", "turns", "reason"),
    [
        ("Echo", 0, None),  # nothing was played yet
        ("Echo", 2, "was in a process that has ended"),
        ("Replayable", 2, None),
        ("Counting", 2, "was in a process that has ended, and answers otherwise in another"),
    ],
)
def test_an_episode_is_played_again_where_another_ends_its_process(
    name: str, turns: int, reason: str | None, host_of: Callable[..., EpisodeHost]
) -> None:
    host, turn = host_of(name), EpisodeTurn(0, [4, 5, 2], complete=True)
    host.send([EpisodeStart(0, Task("1", "well")), EpisodeStart(1, Task("1", "die"))])
    assert all(answer.failure is None for answer in _answers(host, 2).values())
    for _ in range(turns):
        host.send([turn])
        assert _answers(host, 1)[0].failure is None
    host.send([EpisodeTurn(1, [4], complete=True)])
    assert _answers(host, 1)[1].failure == "died"
    host.send([turn])
    answer = _answers(host, 1)[0]
    assert answer.reason == (reason or "") and answer.reward == (0.0 if reason else 1.5)


@pytest.mark.parametrize(("name", "repeated"), [("Replayable", True), ("Echo", False)])
def test_a_call_that_another_took_along_is_repeated_once(
    name: str, repeated: bool, host_of: Callable[..., EpisodeHost]
) -> None:
    answers = _step(host_of(name), "well", "die", "well")
    assert (answers[1].failure, answers[1].reason) == ("died", "ended with exit code 3")
    outcomes = {sample: (answers[sample].failure, answers[sample].reward) for sample in (0, 2)}
    assert outcomes[2] == ((None, 1.5) if repeated else ("died", 0.0))
    assert outcomes[0] in (outcomes[2], (None, 1.5))  # it may have been answered before the process ended


def test_a_process_that_ended_does_not_get_all_new_episodes(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of(workers=4, starts=False)
    ended, *others = host._processes
    for process in others:
        process.episodes = set(range(100))
    chosen = [host._next_process() for _ in range(9)]
    assert chosen.count(ended) == 3  # else all of them
    groups = [frozenset(chosen[first : first + 3]) for first in range(7)]
    assert all(len(group) == 3 for group in groups)  # samples of a group begin one after the other


def test_a_blocked_process_is_killed(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of(tool_timeout_s=0.2)
    host.send([EpisodeStart(0, Task("1", "block"))])
    assert _answers(host, 1)[0].failure is None
    host.send([EpisodeTurn(0, [4], complete=True), EpisodeStart(1, Task("1" * (1 << 22)))])  # more than a socket holds
    answers = _answers(host, 2)
    reason = "blocked its process for more than 0.2 s, which was killed"
    assert (answers[0].failure, answers[0].reason) == ("hung", reason)
    assert answers[1].failure in (None, "hung")  # repeated, unless it was the first whose limit had passed
    assert _step(host, "well")[0].reward == 1.5


def test_a_burst_of_short_calls_is_no_blocked_process(
    host_of: Callable[..., EpisodeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_handle, "_MARGIN_S", 0.0)
    answers = _step(host_of(tool_timeout_s=3.0), *["compute"] * 80)  # 4 s in all
    assert {answer.failure for answer in answers.values()} == {None}


def test_an_episode_may_be_closed_while_it_is_answered(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of(tool_timeout_s=100.0)
    host.send([EpisodeStart(0, Task("1", "wait")), EpisodeStart(1, Task("1", "well"))])
    _answers(host, 2)
    host.send([EpisodeTurn(0, [4], complete=True), EpisodeTurn(1, [4], complete=True)])
    assert _answers(host, 1)[1].reward == 1.5
    host.send([EpisodeClose(0)])
    assert _answers(host, 1)[0].reason == "was closed"
    host.send([EpisodeTurn(1, [4], complete=True)])
    assert _answers(host, 1)[1].reward == 1.5  # in the same process, since it may not be played twice


def test_an_episode_that_is_closed_before_it_begins_gets_no_environment(
    host_of: Callable[..., EpisodeHost], tmp_path: Path
) -> None:
    host = host_of()
    host.send([EpisodeStart(0, Task("1", "note")), EpisodeClose(0)])
    assert _answers(host, 1)[0].reason == "was closed"
    waits = "import os, time\nopen('imports', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    (tmp_path / "waits.py").write_text(waits + SOURCE)
    host = host_of(path="waits.py:Echo", starts=False)
    host.send([EpisodeStart(0, Task("1", "note"))])
    _wait_for_file(tmp_path / "imports")
    host.send([EpisodeClose(0), EpisodeStart(1, Task("1", "well"))])
    (tmp_path / "go").touch()
    answers = _answers(host, 2)
    assert [answers[sample].failure for sample in (0, 1)] == ["died", None]


def test_a_process_that_cannot_be_started_again_is_a_failure(
    host_of: Callable[..., EpisodeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of()
    _step(host, "die")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    host.send([EpisodeStart(0, Task("1", "well"))])
    answer = _answers(host, 1)[0]
    assert answer.failure == "died" and answer.reason.startswith("cannot be called: FileNotFoundError: ")


def test_a_module_that_answers_itself_is_refused(host_of: Callable[..., EpisodeHost], tmp_path: Path) -> None:
    (tmp_path / "forges.py").write_text(FORGES)
    with pytest.raises(
        UserError, match=r"environment \(forges.py:Echo\) answered with 4,294,967,295 bytes, expected at"
    ):
        host_of(path="forges.py:Echo")


def test_the_end_of_an_episode_closes_its_environment(host_of: Callable[..., EpisodeHost], tmp_path: Path) -> None:
    host = host_of()
    _step(host, "note")
    host.send([EpisodeClose(0)])
    _wait_for_file(tmp_path / "closed")


def test_the_end_of_the_run_closes_environments(host_of: Callable[..., EpisodeHost], tmp_path: Path) -> None:
    host = host_of(tool_timeout_s=100.0)
    _step(host, "note")
    host.send([EpisodeStart(1, Task("1", "stubborn"))])
    assert _answers(host, 1)[1].failure is None
    host.send([EpisodeTurn(1, [4], complete=True)])
    host.close()
    assert (tmp_path / "closed").exists()


def test_a_first_observation_behind_the_header_of_the_policy_is_refused(host_of: Callable[..., EpisodeHost]) -> None:
    host = host_of(role="user")
    host.send([EpisodeStart(0, Task("1", "say")), EpisodeStart(1, Task("1", "quiet"))])
    answers = _answers(host, 2)
    assert answers[1].failure is None and answers[0].failure == "nonsense"
    assert answers[0].reason.endswith("expected an empty text from reset, or environment.role=null")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "NotAsync"}, "has no async method 'reset', expected async def reset"),
        ({"name": "Missing"}, "module .*echo.py has no function 'Missing'"),
        ({"arguments": {"depth": 1}}, "does not take its arguments: got an unexpected keyword argument 'depth'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(
    host_of: Callable[..., EpisodeHost], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"environment \(echo.py:\w+\) {reason}"):
        host_of(**settings)
