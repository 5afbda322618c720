"""Calls of a stream's engines: their tasks, the first failure of one, and engines that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine3d.errors import EngineError
from engine3d.rollout.requests import Response
from hybridflow.batch.stream_requests import EngineLostError, SampleEnds, StreamEngine


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

    def submit(self, number: int, submission: Callable[[StreamEngine], Awaitable[None]]) -> None:
        """Run a submission in a task that aborts at the engine wait for."""

        async def run() -> None:
            with self.losing(number):
                await submission(self._engines[number])

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
