"""Calls of a stream's engines and scorers by their handles, the first failure of one, and engines that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayError

from engine3d.errors import EngineError
from engine3d.rollout.requests import Request, Response
from hybridflow.batch.stored_rows import SampleEnds, StoredRow
from hybridflow.data.tasks import Example
from hybridflow.environments.episode import EpisodeAnswer, EpisodeMessage
from hybridflow.errors.rank_failure import Failure

_WAIT_S = 2.0
"""Seconds that an engine's rank waits for a response to end before it reports none."""


class EngineLostError(EngineError):
    """An engine failed and can be restarted."""


class StreamEngine(Protocol):
    """An engine as the controller sees it.

    Each call raises the engine's error: EngineLostError if it can be restarted.
    """

    async def submit(self, requests: Sequence[Request], *, together: bool) -> None:
        """Begin responses. `together`: as of `RolloutEngine.submit`."""

    async def ended(self) -> SampleEnds:
        """Responses that have ended since the last call; waits until one has, but not for ever: it may be none."""

    async def abort(self, samples: Sequence[int]) -> None:
        """Abort responses; each ends."""

    async def in_flight(self) -> Mapping[int, Response]:
        """The responses in flight that have a token, by sample."""


class _RemoteRank:
    """A rank by its handle.

    Args:
        name: of it in errors.
        actor: of the rank.
        threads: Ray's name of the threads that take calls besides those of the group.
        answers_s: that it has for a call.
        failed: raised for an error of the worker that is not the user's.
    """

    def __init__(
        self, name: str, actor: Any, threads: str, answers_s: float, failed: type[EngineError] = EngineError
    ) -> None:
        self._name, self._actor, self._threads, self._failed = name, actor, threads, failed
        self._answers_s = answers_s

    async def call(self, method: str, results: int, *arguments: Any, what: str = "") -> Any:
        """Call a method. Returns its result; of several results the first, and references to the others."""
        calling = self._actor.call_concurrently.options(concurrency_group=self._threads, num_returns=results)
        refs = calling.remote(method, results, *arguments)
        first, *others = refs if results > 1 else [refs]
        try:
            value = await asyncio.wait_for(first, self._answers_s)
        except TimeoutError:
            raise EngineError(f"{self._name}, {what or method}: no answer within {self._answers_s:g} s") from None
        except RayError as error:
            raise EngineError(f"{self._name}, {what or method}: {' '.join(str(error).split())}") from None
        if isinstance(value, Failure):  # the rank answers with the error of its worker
            raise value.exception(self._failed, what or method)
        return (value, *others) if results > 1 else value


class RemoteScorer:
    """A rank of the reward functions.

    Args:
        actor: of the rank.
        threads: Ray's name of its threads.
        examples: that the indices of prompts count.
        answers_s: that it has for a call.
    """

    def __init__(self, actor: Any, threads: str, examples: Sequence[Example], answers_s: float) -> None:
        self._rank, self._examples = _RemoteRank("reward rank", actor, threads, answers_s), examples

    async def score(self, rows: Sequence[StoredRow], prompts: Sequence[int]) -> Sequence[Any]:
        examples = {prompt: self._examples[prompt] for prompt in dict.fromkeys(prompts)}
        scores: Sequence[Any] = await self._rank.call("score_rows", 1, list(rows), examples)
        return scores


class RemoteEpisodes:
    """Environments of a reward rank.

    Args:
        actor: of the rank.
        threads: Ray's name of its threads.
        answers_s: that it has for a call.
    """

    def __init__(self, actor: Any, threads: str, answers_s: float) -> None:
        self._rank = _RemoteRank("reward rank", actor, threads, answers_s)

    async def send(self, messages: Sequence[EpisodeMessage]) -> None:
        await self._rank.call("of_environments", 1, "send", list(messages), what="send to environments")

    async def answers(self) -> Sequence[EpisodeAnswer]:
        answers: Sequence[EpisodeAnswer] = await self._rank.call(
            "of_environments", 1, "take_answers", _WAIT_S, what="wait for environments"
        )
        return answers


class RemoteEngine:
    """An engine by the handle of its first rank.

    Args:
        number: of the engine.
        actor: of the rank.
        node: Ray's id of the node that it is on.
        threads: Ray's name of the threads that take calls besides those of the group.
        answers_s: that the rank has for a call.
        phase: name of its calls in errors; None if each is called by its method.
    """

    def __init__(
        self,
        number: int,
        actor: Any,
        node: str,
        threads: str,
        answers_s: float,
        phase: str | None = None,
    ) -> None:
        self._rank = _RemoteRank(f"rollout rank of engine {number}", actor, threads, answers_s, EngineLostError)
        self._node, self._phase = node, phase

    async def submit(self, requests: Sequence[Request], *, together: bool) -> None:
        await self._call("submit", 1, list(requests), together)

    async def ended(self) -> SampleEnds:
        ends, summary, packed = await self._call("take_ended", 3, _WAIT_S)
        samples = [
            replace(end, row=StoredRow(packed, index, summary, self._node)) if end.is_stored else end
            for index, end in enumerate(ends.samples)
        ]
        return SampleEnds(samples, ends.stats)

    async def abort(self, samples: Sequence[int]) -> None:
        await self._call("abort", 1, list(samples))

    async def in_flight(self) -> Mapping[int, Response]:
        responses: Mapping[int, Response] = await self._call("in_flight", 1)
        return responses

    async def _call(self, method: str, results: int, *arguments: Any) -> Any:
        """Call a method of the engine's stream. Returns its result; of several the first, and references to others."""
        return await self._rank.call("of_stream", results, method, *arguments, what=self._phase or method)


class StreamTasks:
    """Tasks of a stream, and waits for their effects. The first failure of a task raises in all waits."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, action: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def wake(self) -> None:
        """Notify those who wait."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_for[T](self, result: Callable[[], T]) -> T:
        """Wait until this function returns something true. Returns it.

        Raises:
            EngineError: of a task.
        """

        def looked() -> T:
            self.raise_failure()
            return result()

        async with self._changed:
            return await self._changed.wait_for(looked)

    def raise_failure(self) -> None:
        """Raise the first failure of a task, if there is one."""
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks. Returns them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or (error if isinstance(error, Exception) else EngineError(str(error)))
        wake = asyncio.get_running_loop().create_task(self.wake())
        self._tasks.add(wake)
        wake.add_done_callback(self._tasks.discard)


class StreamEngines:
    """Engines by number, and the calls of them that are in flight.

    Args:
        engines: by number.
        tasks: of the stream.
        present: True of the number of an engine that was not lost.
        restarts: how often a lost engine may be restarted.
        lost: called with the number of an engine that is lost and may be restarted, and the cause.
    """

    def __init__(
        self,
        engines: Sequence[StreamEngine],
        tasks: StreamTasks,
        present: Callable[[int], bool],
        restarts: int,
        lost: Callable[[int, str], None],
    ) -> None:
        self._engines, self._tasks, self._is_present = list(engines), tasks, present
        self._restarts_left, self._on_loss = restarts, lost
        self._submitting: dict[int, set[asyncio.Task[None]]] = {}
        """Requests that may not have reached their engine yet, by its number."""
        self._lost: dict[int, str] = {}
        """Lost engines that were not reported to the driver yet, and the cause of each."""
        self._lives = [0] * len(self._engines)
        """Count of losses of each engine: results of an earlier life are ignored."""

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def present(self) -> list[int]:
        """Numbers of the engines that were not lost."""
        return [number for number in range(len(self)) if self._is_present(number)]

    def collect(self, number: int, take_in: Callable[[int, SampleEnds], Awaitable[None]]) -> None:
        """Hand over what ends at an engine, as it ends, until the engine is lost."""
        self._tasks.spawn(self._collect(number, take_in))

    async def _collect(self, number: int, take_in: Callable[[int, SampleEnds], Awaitable[None]]) -> None:
        life = self._lives[number]
        with self.losing(number):
            while life == self._lives[number]:
                ended = await self._engines[number].ended()
                if life == self._lives[number]:
                    await take_in(number, ended)
        await self._tasks.wake()

    def submit(self, number: int, requests: Sequence[Request], *, together: bool) -> None:
        """Submit requests in a task that aborts at the engine wait for."""

        async def run() -> None:
            with self.losing(number):
                await self._engines[number].submit(requests, together=together)

        submitting = self._submitting.setdefault(number, set())
        task = self._tasks.spawn(run())
        submitting.add(task)
        task.add_done_callback(submitting.discard)

    async def abort(self, number: int, samples: Sequence[int]) -> None:
        """Abort responses at an engine, unless it is lost meanwhile."""
        life = self._lives[number]
        with self.losing(number):
            await self.submitted(number)
            if life == self._lives[number]:
                await self._engines[number].abort(samples)

    async def submitted(self, number: int) -> None:
        """Wait for submissions to an engine: a request that has not reached it cannot be aborted."""
        await asyncio.gather(*self._submitting.get(number, ()))

    async def in_flight(self, number: int) -> Mapping[int, Response]:
        """The responses in flight at an engine that have a token, by sample; none if it is lost meanwhile."""
        with self.losing(number):
            return await self._engines[number].in_flight()
        return {}

    def take_lost(self) -> dict[int, str]:
        """The engines that were lost since the last call, with the cause of each."""
        lost, self._lost = self._lost, {}
        return lost

    @contextmanager
    def losing(self, number: int) -> Iterator[None]:
        """Remove an engine that is lost in the block, if it may be restarted."""
        life = self._lives[number]
        try:
            yield
        except EngineLostError as error:
            if life != self._lives[number] or not self._is_present(number):
                return  # known already, by another of its calls
            if not self._restarts_left:
                raise
            self._restarts_left -= 1
            self._lives[number] += 1
            self._lost[number] = str(error)
            self._on_loss(number, str(error))
