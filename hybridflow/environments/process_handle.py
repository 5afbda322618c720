"""A process of environments, as seen by the event loop that calls them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from engine3d.errors import UserError
from hybridflow.environments.call_server import CLOSE_S, NonsenseError, checked
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.rewards.processes.function_process import encode_message
from hybridflow.rewards.processes.supervised_process import SupervisedProcess, import_setup, in_words

FailureKind = Literal["raised", "timeout", "hung", "died", "nonsense", "flooded"]
"""Failures of an environment: an exception, no answer in time, no answer of its process in time, the end of its
process, an answer that is no observation, and requests of an agent without end."""

_MARGIN_S = 5.0
"""Seconds after an answer's limit in which a process that is not blocked reports it."""
_MOST_WAITS = 20
"""Limits of an answer after which one is overdue although its process answers others."""
_OTHER_BYTES = 1 << 16
"""Largest size of an answer besides its text."""
_BYTES_PER_CHARACTER = 12
"""Largest size of a character in JSON."""
_HEADER = struct.Struct("!I")


class FailedEnvironmentError(Exception):
    """An environment gave no observation.

    Args:
        kind: of the failure.
        reason: one line, to follow the name of the environment.
        shared: True if the process ended while it had calls of other episodes too, one of which may have ended it.
    """

    def __init__(self, kind: FailureKind, reason: str, *, shared: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.shared = kind, reason, shared


class EnvironmentProcess:
    """Many environments in one process, which is started again after its end. All calls are of one event loop.

    Args:
        config: of the environments.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._limits = {**config.limits.in_bytes(), "output_lines": None, "name": "environment"}
        self._most_bytes = _OTHER_BYTES + _BYTES_PER_CHARACTER * config.max_answer_characters
        self._process: SupervisedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._heard = 0.0
        """Time of the last message, by the loop's clock."""
        self._starting = asyncio.Lock()
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of tools; known once the process has started."""
        self.replayable = False
        """True if the class lets its episodes be played again; known once the process has started."""
        self.episodes: set[int] = set()
        """Episodes that have an environment here."""

    async def start(self) -> None:
        """Start the process and load the class, unless it runs.

        Raises:
            UserError: the class cannot be loaded, or is no environment.
        """
        async with self._starting:
            if self._process is not None:
                return
            process = await asyncio.to_thread(SupervisedProcess, self._limits, self._config.environment)
            process.connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=process.connection, limit=1 << 20)
            config = self._config
            setup = import_setup(config.class_path, config.class_arguments, str(Path.cwd()))
            setup |= {
                "server": config.server,
                "most_characters": config.max_answer_characters,
                "tool_timeout_s": config.tool_timeout_s,
                "fields": None,
            }
            writer.write(encode_message(setup))
            limit_s = config.load_timeout_s
            try:
                reply = await asyncio.wait_for(self._message(reader), limit_s)
                reason = reply.get("error")
                self.replayable = reply.get("replayable") is True
                self.tools = reply.get("tools", [])
            except TimeoutError:
                reason = f"did not finish its import within {limit_s:g} s"
            except NonsenseError as error:
                reason = str(error)
            except (OSError, asyncio.IncompleteReadError):
                reason = f"{await _death(process)} instead of returning from its import"
            if reason is not None:
                writer.transport.abort()
                await _end(process)
                raise UserError(f"{config.title}{' ' if config.title.endswith(')') else ': '}{in_words(reason)}")
            self._process, self._writer = process, writer
            self._reading = asyncio.create_task(self._read(process, reader))

    async def call(self, episode: int, method: str, *, limit_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Call the method "reset" or "step" of an episode's environment. Returns the fields of its observation.

        `limit_s`: of the answer, `tool_timeout_s` if None.

        Raises:
            FailedEnvironmentError: it gave none.
        """
        limit_s = limit_s or self._config.tool_timeout_s
        if method in ("reset", "play"):
            self.episodes.add(episode)
            try:
                await self.start()
            except UserError as error:  # it could be loaded before
                raise FailedEnvironmentError("died", in_words(error)) from None
        if episode not in self.episodes or self._writer is None:  # it may have been closed during the start
            raise FailedEnvironmentError("died", "was in a process that has ended")
        future = self._calls[episode] = asyncio.get_running_loop().create_future()
        try:
            self._send(episode, method, limit_s, fields)
            reply = await self._answer_of(future, limit_s + _MARGIN_S)
        except TimeoutError:
            reason = f"blocked its process for more than {limit_s:g} s, which was killed"
            await self._stop("hung", reason, self._process)
            raise FailedEnvironmentError("hung", reason) from None
        finally:
            if self._calls.get(episode) is future:
                del self._calls[episode]
        if (kind := reply.get("failure")) is not None:
            raise FailedEnvironmentError(
                kind if kind in ("raised", "timeout") else "nonsense", in_words(reply.get("reason"))
            )
        return reply

    async def _answer_of(self, future: asyncio.Future[dict[str, Any]], limit_s: float) -> dict[str, Any]:
        """Wait for the answer of a call, behind those of others if need be.

        Raises:
            TimeoutError: the process has sent nothing for `limit_s`, or it has lost this call.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        end = began + limit_s
        while not future.done() and clock() < end:
            await asyncio.wait({future}, timeout=end - clock())
            end = min(max(began, self._heard) + limit_s, began + _MOST_WAITS * limit_s)
        if not future.done():
            raise TimeoutError
        return future.result()

    async def look(self, episode: int) -> None:
        """Kill the process of an episode if it answers no call. Raises FailedEnvironmentError of the kind "hung" then.

        `episode`: an agent's, which may not have been closed.
        """
        number = -1 - episode
        self.episodes.add(number)
        try:
            await self.call(number, "look")
        finally:
            self.episodes.discard(number)

    def close_episode(self, episode: int) -> None:
        """End an episode's environment, and a call of it."""
        if (future := self._calls.get(episode)) is not None and not future.done():  # the process will not answer it
            future.set_exception(FailedEnvironmentError("died", "was closed"))
            future.exception()  # its caller may have gone
        if episode in self.episodes:
            self.episodes.discard(episode)
            if self._writer is not None:
                self._send(episode, "close", self._config.tool_timeout_s, {})

    async def stop(self) -> None:
        """Kill the process and whatever it started, once its environments were closed or a few seconds later."""
        if self._writer is not None and self._reading is not None:
            with contextlib.suppress(OSError):
                self._writer.write_eof()
            await asyncio.wait({self._reading}, timeout=CLOSE_S + _MARGIN_S)
        await self._stop("died", "was ended with the run", self._process)

    def _send(self, episode: int, method: str, limit_s: float, fields: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(encode_message({"episode": episode, "method": method, "limit_s": limit_s, **fields}))

    async def _message(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if size > self._most_bytes:
            raise NonsenseError(f"answered with {size:,} bytes, expected at most {self._most_bytes:,}")
        try:
            message = json.loads(await reader.readexactly(size))
        except (ValueError, RecursionError):
            raise NonsenseError("answered with what is no JSON") from None
        if not isinstance(message, dict):
            raise NonsenseError(f"answered with a {type(message).__name__}")
        return message

    async def _read(self, process: SupervisedProcess, reader: asyncio.StreamReader) -> None:
        """Take answers until the process ends, or writes what is none."""
        kind: FailureKind = "died"
        try:
            while True:
                message = await self._message(reader)
                self._heard = asyncio.get_running_loop().time()
                episode = message.get("episode")
                future = self._calls.get(episode) if isinstance(episode, int) else None
                if future is not None and not future.done():
                    future.set_result(self._reply(message))
        except NonsenseError as error:
            kind, reason = "nonsense", str(error)
        except (OSError, asyncio.IncompleteReadError):
            if process is not self._process:
                return
            reason = await _death(process)
        await self._stop(kind, reason, process)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        """An answer, checked again: the user's code may have written it itself."""
        from hybridflow.environments.environment import Observation

        if "failure" in message:
            return message
        try:
            fields = {name: message.get(name) for name in ("text", "answers", "reward", "done", "counts")}
            return checked(Observation(**fields), self._config.max_answer_characters)  # type: ignore[arg-type]
        except NonsenseError as error:
            return {"failure": "nonsense", "reason": str(error)}
        except RecursionError:
            return {"failure": "nonsense", "reason": "answered with what is nested too deeply"}

    async def _stop(self, kind: FailureKind, reason: str, process: SupervisedProcess | None) -> None:
        """End the process, and with it the calls of all its environments."""
        if process is None or process is not self._process:
            return
        self._process, writer, self._writer = None, self._writer, None
        self.episodes.clear()
        waiting = [future for future in self._calls.values() if not future.done()]
        for future in waiting:
            other = "died" if kind == "hung" else kind
            why = f"shared a process that {reason}" if kind == "hung" else reason
            future.set_exception(FailedEnvironmentError(other, why, shared=len(waiting) > 1))
            future.exception()  # its caller may have gone
        if writer is not None:
            writer.transport.abort()  # it does not wait for a process that reads nothing
        await _end(process)


async def _end(process: SupervisedProcess) -> None:
    """End a process. One that outlives its kill is left to the system."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        await asyncio.to_thread(process.end)


async def _death(process: SupervisedProcess) -> str:
    """End a process that does not answer any more. Returns why it does not, in words."""
    try:
        return await asyncio.to_thread(process.death)
    except (OSError, subprocess.TimeoutExpired):
        return "closed its connection, did not end when it was killed,"


async def start_once(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Start a process of environments, and end it. Returns the schemas of its tools.

    Raises:
        UserError: the class or a tool cannot be loaded.
    """
    process = EnvironmentProcess(config)
    await process.start()
    await process.stop()
    return process.tools
