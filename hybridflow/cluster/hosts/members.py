"""A host of a launch, from the side of its supervisor."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.channel import Channel, Message
from hybridflow.cluster.hosts.checks.comparison import Report
from hybridflow.cluster.hosts.checks.facts import HostFacts
from hybridflow.cluster.hosts.description import Host
from hybridflow.rundir.status.hosts_file import NetworkSetting

_GONE = "its agent is gone"


class Member:
    """A host of a launch.

    Args:
        hello: first message of its agent.
        channel: to its agent.
    """

    def __init__(self, hello: Message, channel: Channel) -> None:
        self.host = Host(**hello["host"])
        self.channel = channel
        self.words: Sequence[str] = hello["words"]
        """Words of the command, without its secrets."""
        self.words_digest: str = hello["words_digest"]
        self.settings = [NetworkSetting(**setting) for setting in hello["settings"]]
        """Variables of the network in force there."""
        self.report = Report(self.host, HostFacts(**hello["software"]))
        self.seen = time.monotonic()
        self.gone = asyncio.Event()
        """Set once its connection has ended, or has been silent for too long."""
        self.stays = False
        """True if it was there from the beginning, or has a place in the run, and was never gone since."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Message]] = {}

    def leave(self) -> None:
        """Note that it is gone: nothing is waited for any more."""
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
