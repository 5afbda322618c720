"""Environments of a rank: tokens to texts, texts to the processes of environments, and their answers to tokens."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine3d.errors import UserError
from engine3d.rollout.tool_calls import CallsOfText
from hybridflow.environments.call_server import AMBIGUOUS, RENDERED_OTHERWISE
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.conversation_check import ConversationCheck, Exchange
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeClose, EpisodeMessage, EpisodeStart, EpisodeTurn
from hybridflow.environments.observation_tokens import ObservationTokens
from hybridflow.environments.process_handle import EnvironmentProcess, FailedEnvironmentError
from hybridflow.rewards.processes.supervised_process import in_words

_MOST_LOGGED = 5
"""Conversations that differ from their messages and are logged."""
_CLOSE_S = 30.0
"""Seconds that all processes have to end."""


@dataclass(slots=True)
class _HostedEpisode:
    """An episode with its environment.

    Args:
        task: of it.
        process: that has the environment.
        check: of its conversation; None once that has differed.
        turns: arguments of its steps so far.
        answers: texts of its observations so far, the first one included.
    """

    task: Task
    process: EnvironmentProcess
    check: ConversationCheck | None
    turns: list[dict[str, Any]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


class EpisodeHost:
    """Environments in processes, called from an event loop in a thread of its own. Any thread may call the methods.

    Args:
        config: of the environments.
        tokens: encodes what they answer.
    """

    def __init__(self, config: EnvironmentConfig, tokens: ObservationTokens) -> None:
        self._tokens = tokens
        self._processes = [EnvironmentProcess(config) for _ in range(config.workers)]
        self._recent: deque[EnvironmentProcess] = deque(maxlen=config.workers // 2)
        """Processes of the last episodes that began."""
        self._repeats = asyncio.Lock()
        self._logged = 0
        self._hosted: dict[int, _HostedEpisode] = {}
        self._answers: queue.SimpleQueue[EpisodeAnswer] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start every process. Raises UserError where the class or a tool cannot be loaded."""

        async def start_all() -> None:
            await asyncio.gather(*(process.start() for process in self._processes))

        self._wait_for(start_all())

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools, once started; none of other environments."""
        return self._processes[0].tools

    def send(self, messages: Sequence[EpisodeMessage]) -> None:
        """Begin what these ask for."""
        self._loop.call_soon_threadsafe(self._begin, messages)

    def take_answers(self, wait_s: float) -> list[EpisodeAnswer]:
        """Return answers since the last call. Waits up to `wait_s` for one."""
        answers: list[EpisodeAnswer] = []
        try:
            answers.append(self._answers.get(timeout=wait_s))
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            return answers

    def close(self) -> None:
        """Kill every process, once its environments were closed or a few seconds later. May be called twice."""
        if self._loop.is_closed():
            return

        self._wait_for(self._stop(), _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        """End all tasks and processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(process.stop() for process in self._processes), return_exceptions=True)

    def _wait_for(self, action: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(limit_s)

    def _begin(self, messages: Sequence[EpisodeMessage]) -> None:
        for message in messages:
            if isinstance(message, EpisodeClose):
                hosted = self._hosted.pop(message.sample, None)
                if hosted is not None:
                    hosted.process.close_episode(message.sample)
                continue
            if isinstance(message, EpisodeStart):  # an end among these messages finds it
                process = self._next_process()
                process.episodes.add(message.sample)
                check = ConversationCheck(self._tokens)
                self._hosted[message.sample] = _HostedEpisode(message.task, process, check)
            self._start_task(self._answer(message))

    def _start_task(self, action: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_process(self) -> EnvironmentProcess:
        """Choose the process with the fewest episodes of those in which none of the last episodes began.

        One that has just ended has none. It would get all new episodes otherwise, and the samples of a group, which
        begin one after the other, would share it.
        """
        others = [process for process in self._processes if process not in self._recent]
        process = min(others, key=lambda process: len(process.episodes))
        self._recent.append(process)
        return process

    async def _call(self, sample: int, hosted: _HostedEpisode, method: str, **arguments: Any) -> dict[str, Any]:
        """Call an environment. A call that its process lost with those of other episodes is repeated once.

        One of the others may have ended the process. Repeated calls run one after the other, so that it ends none of
        theirs again.

        Raises:
            FailedEnvironmentError: it gave no observation, or its step may not be played again.
        """
        try:
            return await hosted.process.call(sample, method, **arguments)
        except FailedEnvironmentError as error:
            if not error.shared or not (method == "reset" or hosted.process.replayable):
                raise
            async with self._repeats:
                if self._hosted.get(sample) is not hosted:
                    raise
                if method == "reset":
                    hosted.process = self._next_process()
                else:
                    await self._repeat(sample, hosted)
                return await hosted.process.call(sample, method, **arguments)

    async def _repeat(self, sample: int, hosted: _HostedEpisode) -> None:
        """Make the environment of an episode again that has lost its process, and play its turns again.

        Raises:
            FailedEnvironmentError: it may not be played again, or answers otherwise.
        """
        if hosted.turns and not hosted.process.replayable:
            raise FailedEnvironmentError("died", "was in a process that has ended")
        hosted.process = self._next_process()
        calls = [("reset", asdict(hosted.task)), *(("step", turn) for turn in hosted.turns)]
        for (method, arguments), answer in zip(calls, hosted.answers, strict=True):
            observation = await hosted.process.call(sample, method, **arguments)
            if observation["text"] != answer:
                raise FailedEnvironmentError(
                    "died", "was in a process that has ended, and answers otherwise in another"
                )

    async def _answer(self, message: EpisodeStart | EpisodeTurn) -> None:
        began = time.monotonic()
        try:
            answer = await self._answered(message)
        except FailedEnvironmentError as error:
            answer = {"failure": error.kind, "reason": error.reason}
        except UserError as error:
            answer = {"failure": "nonsense", "reason": f"returned what is no text for the tokenizer: {error}"}
        except Exception as error:  # without an answer, the step would wait for ever
            answer = {"failure": "died", "reason": in_words(f"cannot be called: {type(error).__name__}: {error}")}
        self._answers.put(EpisodeAnswer(message.sample, seconds=time.monotonic() - began, **answer))

    async def _answered(self, message: EpisodeStart | EpisodeTurn) -> dict[str, Any]:
        """Fields of an answer. Raises what failed."""
        sample, turn = message.sample, list[int]()
        hosted = self._hosted.get(sample)
        if hosted is None:
            raise FailedEnvironmentError("died", "was closed")
        if isinstance(message, EpisodeStart):
            observation = await self._call(sample, hosted, "reset", **asdict(message.task))
        else:
            turn = list(message.tokens)
            if sample not in hosted.process.episodes:
                await self._repeat(sample, hosted)
            calls = self._tokens.calls_of(turn)
            played: dict[str, Any] = {
                "text": self._tokens.text_of(turn),
                "complete": message.complete,
                "calls": [(call.name, call.arguments) for call in calls.calls],
                "malformed": calls.malformed,
            }
            observation = await self._call(sample, hosted, "step", **played)
            hosted.turns.append(played)
        text, answers = observation.pop("text"), observation.pop("answers")
        if not turn:
            calls = CallsOfText("")
        if text and not turn and self._tokens.role is not None:
            raise FailedEnvironmentError(
                "nonsense",
                f"begins with a text, and the policy's message has begun already where environment.role is "
                f"{self._tokens.role}; expected an empty text from reset, or environment.role=null",
            )
        hosted.answers.append(text)
        if turn and self._tokens.is_ambiguous(turn):
            observation["counts"] = {**observation["counts"], AMBIGUOUS: 1.0}
        if answers and not (calls.calls or calls.malformed):
            raise FailedEnvironmentError(
                "nonsense", f"returned {len(answers)} answers of tools to a turn without calls, expected a text"
            )
        is_over = turn and observation["done"]  # nothing reads the text
        if is_over:
            tokens = list[int]()
        elif calls.calls or calls.malformed:
            tokens = self._tokens.after_calls(turn, calls, answers)
        else:
            tokens = self._tokens.after(turn, text)
        if turn:
            exchange = Exchange(turn, calls, tokens, answers or [text])
            self._check(message.sample, hosted, exchange, observation)
        return observation | {"tokens": tokens}

    def _check(self, sample: int, hosted: _HostedEpisode, exchange: Exchange, observation: dict[str, Any]) -> None:
        """Count a conversation that differs from its messages, once, and log the first few of all."""
        if hosted.check is None or (difference := hosted.check.difference(exchange)) is None:
            return
        hosted.check = None
        observation["counts"] = {**observation["counts"], RENDERED_OTHERWISE: 1.0}
        self._log_difference(sample, len(hosted.turns), difference)

    def _log_difference(self, sample: int, turns: int, difference: str) -> None:
        if self._logged < _MOST_LOGGED:
            self._logged += 1
            print(f"environment: the text of sample {sample}, turn {turns}, {difference}", flush=True)
