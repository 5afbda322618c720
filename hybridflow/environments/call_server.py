"""Calls of episodes that a process serves in one event loop.

Messages as in `function_process`. A call is {"episode": id, "method": name, "limit_s": seconds, ...} with arguments. It
is answered with the fields of an `Observation`, as {"episode": id, "text": ..., ...}, or as {"episode": id,
"failure": kind, "reason": words}. The method "close" has no answer. The code that runs here is the user's: the parent
checks every answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.environments.environment import Observation
from hybridflow.rewards.processes.function_process import describe, encode_message

MOST_COUNTS = 64
"""Names of counts in an observation."""
CLOSE_S = 5.0
"""Seconds that all environments have to close at the end of the run."""
AMBIGUOUS = "ambiguous_turns"
"""Count of turns whose text would be encoded as other tokens."""
RENDERED_OTHERWISE = "rendered_otherwise"
"""Count of episodes whose text is another than the chat template makes of their messages."""
_OF_EPISODES = (
    "turns",
    "policy_ms",
    "environment_ms",
    "policy_tokens",
    "environment_tokens",
    "mean",
    "failed",
    AMBIGUOUS,
    RENDERED_OTHERWISE,
)
"""Names of metrics that every episode has."""
_HEADER = struct.Struct("!I")


class NonsenseError(Exception):
    """An answer that is no observation, in words."""


def checked(observation: Any, most_characters: int) -> dict[str, Any]:
    """The fields of an observation. Raises NonsenseError for what is none."""
    if not isinstance(observation, Observation):
        raise NonsenseError(f"returned a {type(observation).__name__}, expected an Observation")
    text, answers, reward = observation.text, observation.answers, observation.reward
    done, counts = observation.done, observation.counts
    if not isinstance(answers, list | tuple):
        raise NonsenseError(f"returned answers={answers!r:.60}, expected a list of texts")
    for some in (text, *answers):
        _check_text(some, most_characters)
    _check_text("".join(answers), most_characters)
    if not isinstance(done, bool):
        raise NonsenseError(f"returned done={done!r:.60}, expected True or False")
    if not isinstance(counts, Mapping) or len(counts) > MOST_COUNTS:
        raise NonsenseError(f"returned counts={counts!r:.60}, expected numbers by name, at most {MOST_COUNTS}")
    if not all(isinstance(name, str) and name.isidentifier() and len(name) <= 60 for name in counts):
        raise NonsenseError(f"returned counts named {list(counts)!r:.60}, expected letters, digits and _")
    if taken := [name for name in counts if name in _OF_EPISODES or name.startswith("failed_")]:
        raise NonsenseError(f"returned counts named {taken[0]!r}, which is a metric of every episode")
    numbers = {"reward": reward, **counts}
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise NonsenseError(f"returned {name}={value!r:.60}, expected a finite number")
        if abs(value) > 1e30:
            raise NonsenseError(f"returned {name}={value!r:.60}, expected a number within the range of float32")
    return {
        "text": text,
        "answers": list(answers),
        "reward": float(reward),
        "done": done,
        "counts": {name: float(value) for name, value in counts.items()},
    }


def _check_text(text: Any, most_characters: int) -> None:
    if not isinstance(text, str) or len(text) > most_characters:
        shown = f"of {len(text):,} characters" if isinstance(text, str) else f"that is a {type(text).__name__}"
        raise NonsenseError(f"returned a text {shown}, expected at most {most_characters:,} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NonsenseError("returned a text with a lone surrogate, which is not UTF-8") from None


class CallServer(ABC):
    """Serves calls of episodes.

    Args:
        writer: to the parent.
        most_characters: of an observation.
    """

    def __init__(self, writer: asyncio.StreamWriter, most_characters: int = 0) -> None:
        self._writer, self._most_characters = writer, most_characters
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Call of each episode that is being answered."""

    @abstractmethod
    async def _called(self, call: dict[str, Any]) -> Observation:
        """Answer a call."""

    @abstractmethod
    def _close(self, episode: int, limit_s: float) -> None:
        """End an episode, whose call was cancelled, within `limit_s`."""

    @abstractmethod
    async def _end(self) -> None:
        """End all episodes: the parent sends no more."""

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Serve calls until the parent sends no more. End all episodes then."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._begin(json.loads(await reader.readexactly(size)))
                await asyncio.sleep(0)  # answers are sent between the calls of a burst
        await self._end()

    def _begin(self, call: dict[str, Any]) -> None:
        episode = call["episode"]
        if call["method"] == "close":
            if (running := self._tasks.get(episode)) is not None:
                running.cancel()
            self._close(episode, call["limit_s"])
            return
        task = self._tasks[episode] = asyncio.create_task(self._answer(call))
        task.add_done_callback(lambda ended: self._ended(episode, ended))

    def _ended(self, episode: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(episode) is task:
            del self._tasks[episode]

    async def _answer(self, call: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self._called(call))
        try:
            await asyncio.wait({task}, timeout=call["limit_s"])
            if not task.done():
                raise TimeoutError
            reply = checked(task.result(), self._most_characters)
        except TimeoutError:
            reply = {"failure": "timeout", "reason": f"gave no answer within {call['limit_s']:g} s"}
        except NonsenseError as error:
            reply = {"failure": "nonsense", "reason": str(error)}
        except (Exception, asyncio.CancelledError) as error:
            if not task.done():  # it is this call that was cancelled: its episode was closed
                raise
            reply = {"failure": "raised", "reason": f"raised {describe(error)}"}
        finally:
            task.cancel()  # nothing waits for one that ignores it
        self._writer.write(encode_message({"episode": call["episode"], **reply}))


async def serve_calls(connection: socket.socket, server: Callable[[asyncio.StreamWriter], CallServer]) -> None:
    """Serve calls until the parent closes the connection. `server`: makes one that answers to a writer."""
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    await server(writer).run(reader)
    writer.close()  # the parent waits for this, and not for calls that cannot be cancelled
