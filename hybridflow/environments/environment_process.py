"""The process of many environments, which share one event loop. `function_process` has loaded their class.

A call of `call_server` has the method "reset" with the fields of a `Task`, "step" with those of a `Turn`, or "close".
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import Callable
from typing import Any

from engine3d.rollout.tool_calls import ToolCall
from hybridflow.environments.call_server import CLOSE_S, CallServer, serve_calls
from hybridflow.environments.environment import Environment, Observation, Task, Turn
from hybridflow.rewards.processes.function_process import encode_message

_METHODS = ("reset", "step", "close")


def problem_of(kind: Any) -> str | None:
    """Return why a class is no environment, to follow "it"; None if it is one."""
    if not isinstance(kind, type):
        return f"is a {type(kind).__name__}, expected a class with the methods {', '.join(_METHODS)}"
    for name in _METHODS:
        if not inspect.iscoroutinefunction(getattr(kind, name, None)):
            return f"has no async method {name!r}, expected async def {name}(...)"
    return None


class EnvironmentServer(CallServer):
    """Serves calls of environments.

    Args:
        make: makes one.
        most_characters: of an observation.
        writer: to the parent.
    """

    def __init__(self, make: Callable[[], Environment], most_characters: int, writer: asyncio.StreamWriter) -> None:
        super().__init__(writer, most_characters)
        self._make = make
        self._environments: dict[int, Environment] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _close(self, episode: int, limit_s: float) -> None:
        if (environment := self._environments.pop(episode, None)) is not None:
            task = asyncio.create_task(_closed(environment, limit_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self) -> None:
        ends = [asyncio.create_task(_closed(environment, CLOSE_S)) for environment in self._environments.values()]
        if ends or self._closing:
            await asyncio.wait([*ends, *self._closing], timeout=CLOSE_S)

    async def _called(self, call: dict[str, Any]) -> Observation:
        episode = call["episode"]
        if call["method"] == "reset":
            environment = self._environments[episode] = self._make()
            return await environment.reset(Task(call["prompt"], call["answer"], call["fields"], call["seed"]))
        calls = [ToolCall(*given) for given in call["calls"]]
        turn = Turn(call["text"], call["complete"], calls, call["malformed"])
        return await self._environments[episode].step(turn)


async def _closed(environment: Environment, limit_s: float) -> None:
    with contextlib.suppress(Exception):  # the episode is over
        await asyncio.wait_for(environment.close(), limit_s)


def serve(connection: socket.socket, kind: Any, setup: dict[str, Any]) -> None:
    """Serve calls of environments of this class until the parent closes the connection.

    Args:
        connection: to the parent.
        kind: the class.
        setup: first message: with `arguments`, and `most_characters` of an observation.
    """
    problem = problem_of(kind)
    if problem is None:
        try:
            inspect.signature(kind).bind(**setup["arguments"])
        except TypeError as error:
            problem = f"does not take its arguments: {error}"
    if problem is not None:
        connection.sendall(encode_message({"error": problem}))
        return
    connection.sendall(encode_message({"replayable": getattr(kind, "replayable", False) is True}))
    run_environments(connection, lambda: kind(**setup["arguments"]), setup["most_characters"])


def run_environments(connection: socket.socket, make: Callable[[], Environment], most_characters: int) -> None:
    """Serve calls until the parent closes the connection.

    Args:
        connection: to the parent.
        make: makes the environment of an episode.
        most_characters: of an observation.
    """
    asyncio.run(serve_calls(connection, lambda writer: EnvironmentServer(make, most_characters, writer)))
