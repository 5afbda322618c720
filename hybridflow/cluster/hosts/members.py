"""A host of a launch as its supervisor knows it: its description, its connection, and what its agent is asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.channel import Channel, Message
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.network.network_settings import Setting
from hybridflow.errors.log import log

_GONE = "its agent is gone"


class Member:
    """A host as its supervisor knows it.

    Args:
        host: as its agent describes it.
        channel: to its agent.
        settings: of the network that are in force there.
    """

    def __init__(self, host: Host, channel: Channel, settings: Sequence[Setting] = ()) -> None:
        self.host, self.channel, self.settings = host, channel, settings
        self.seen = time.monotonic()
        self.gone = asyncio.Event()
        """Its connection has ended, or tells nothing any more."""
        self.is_checked = False
        """Whether it has been compared with the others."""
        self.is_apart = False
        """Whether it does not see what host 0 has at `run_dir`."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Message]] = {}

    def leave(self) -> None:
        """It is gone: nothing is waited for any more."""
        self.gone.set()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineError(_GONE))

    def take(self, message: Message) -> None:
        """Note an answer."""
        future = self._answers.pop(message["number"], None)
        if future is not None and not future.done():
            future.set_result(message)

    async def ask(self, kind: str, limit_s: float, **fields: Any) -> Message:
        """Ask its agent for something.

        Raises:
            EngineError: it cannot be done there, there is no answer in time, or the agent is gone.
        """
        if self.gone.is_set():
            raise EngineError(f"{self.host}: {_GONE}")
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self.channel.send(kind, number=number, **fields)
        try:
            answer = await asyncio.wait_for(self._answers[number], limit_s)
        except TimeoutError:
            raise EngineError(f"{self.host}: no answer within {limit_s:g} s ({kind})") from None
        except EngineError as gone:
            raise EngineError(f"{self.host}: {gone}") from None
        finally:
            self._answers.pop(number, None)
        if (error := answer.get("error")) is not None:
            raise EngineError(f"{self.host}: {error}")
        return answer


def tell_settings(members: Sequence[Member]) -> None:
    """Log what is in force of the network, those hosts together that have the same."""
    by_text: dict[str, list[str]] = {}
    for member in members:
        text = ", ".join(map(str, member.settings))
        by_text.setdefault(text or "nothing set", []).append(str(member.host))
    for text, names in by_text.items():
        log.info(f"network of {listed(names)}: {text}")
