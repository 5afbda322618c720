"""The process of many agents. `function_process` has loaded their function.

A call of `call_server` has the method "play" with the fields of a `Task`, and
the `base_url` and `api_key` of its session. It is answered with the fields of an `Observation`, which is done if the
function has returned a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from hybridflow.environments.call_server import CallServer, serve_calls
from hybridflow.environments.environment import Observation, Task
from hybridflow.rewards.processes.function_process import encode_message

_MOST_THREADS = 4096
"""Functions that are not async at a time."""
_MOST_ABANDONED, _GRACE_S = 256, 60.0
"""Functions of ended episodes that may run on, with more of which a process ends itself, and seconds until they count:
their sessions refuse their requests."""
_OF_SESSION = ("base_url", "api_key")


class AgentServer(CallServer):
    """Calls a function for each episode: in the event loop if it is async, otherwise in a thread of its own.

    Args:
        play: the function, with the arguments of its settings.
        writer: to the parent.
    """

    def __init__(self, play: Callable[..., Any], writer: asyncio.StreamWriter) -> None:
        super().__init__(writer)
        self._play = play
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "agent")
        self._abandoned: set[Future[Any]] = set()

    async def _called(self, call: dict[str, Any]) -> Observation:
        if call["method"] == "look":  # if the event loop is blocked
            return Observation()
        task = Task(call["prompt"], call["answer"], call["fields"], call["seed"])
        play = partial(self._play, task, **{name: call[name] for name in _OF_SESSION})
        if inspect.iscoroutinefunction(self._play):
            reward = await play()
        else:
            reward = await self._in_thread(play)
        return Observation() if reward is None else Observation(reward=reward, done=True)

    async def _in_thread(self, play: Callable[[], Any]) -> Any:
        future = self._threads.submit(play)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.done():
                asyncio.get_running_loop().call_later(_GRACE_S, self._abandon, future)
            raise

    def _abandon(self, future: Future[Any]) -> None:
        """Count a function of an ended episode that still runs."""
        self._abandoned = {other for other in (*self._abandoned, future) if not other.done()}
        if len(self._abandoned) > _MOST_ABANDONED:
            print(f"{len(self._abandoned)} agents have not returned after their episode", file=sys.stderr, flush=True)
            os._exit(1)

    def _close(self, episode: int, limit_s: float) -> None:
        """Leave an agent as it is: its call was cancelled, and its session answers nothing more."""

    async def _end(self) -> None:
        """Leave all agents to the end of the process."""


def serve(connection: socket.socket, function: Any, setup: dict[str, Any]) -> None:
    """Serve calls of an agent's function until the parent closes the connection.

    Args:
        connection: to the parent.
        function: of the agent.
        setup: first message: with `arguments`.
    """
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(_OF_SESSION), **setup["arguments"])
    except TypeError as error:
        problem = f"does not take (task, {', '.join(_OF_SESSION)}) and its arguments: {error}"
        connection.sendall(encode_message({"error": problem}))
        return
    connection.sendall(encode_message({"replayable": False}))
    play = partial(function, **setup["arguments"])
    asyncio.run(serve_calls(connection, lambda writer: AgentServer(play, writer)))
