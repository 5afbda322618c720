"""A host of a launch, from the side of its supervisor."""

from __future__ import annotations

import asyncio
import time

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.channel import Channel, Message
from hybridflow.cluster.hosts.description import Host
from hybridflow.rundir.status.hosts_file import NetworkSetting


class Member:
    """A host of a launch.

    Args:
        hello: first message of its agent.
        channel: to its agent.
    """

    def __init__(self, hello: Message, channel: Channel) -> None:
        self.host = Host(**hello["host"])
        self.channel = channel
        self.words: list[str] = hello["words"]
        """Words of the command, without its secrets."""
        self.words_digest: str = hello["words_digest"]
        self.must_agree: dict[str, str] = hello["must_agree"]
        """Values without which Ray does not start, or the command does not mean the same."""
        self.software: str = hello["software"]
        """`software_digest` of it."""
        self.free_ports: int | None = hello["free_ports"]
        """Free ones of `network.ports`, of the first that are needed. None for any ports."""
        self.settings = [NetworkSetting(**setting) for setting in hello["settings"]]
        """Variables of the network in force there."""
        self.seen = time.monotonic()
        self.gone = asyncio.Event()
        """Set once its connection has ended, or has been silent for too long."""
        self.has_answered = asyncio.Event()
        """Set once it has started or stopped Ray, or has failed to, or is gone."""
        self.stays = False
        """True if it was there from the beginning, or has a place in the run, and was never gone since."""

    def leave(self) -> None:
        """Note that it is gone: nothing is waited for any more."""
        self.gone.set()
        self.has_answered.set()

    async def change_ray(self, limit_s: float, cpus: int = 0, gcs_address: str | None = None) -> None:
        """Ask it to join a cluster, or to end Ray and all that is left of the run if None. A failure is a loss.

        Raises:
            EngineError: it is there, and does not answer in time.
        """
        if self.gone.is_set():
            return
        self.has_answered.clear()
        self.channel.send("ray", cpus=cpus, gcs_address=gcs_address)
        try:
            await asyncio.wait_for(self.has_answered.wait(), limit_s)
        except TimeoutError:
            what = "start" if gcs_address is not None else "end"
            raise EngineError(f"{self.host}: Ray did not {what} within {limit_s:g} s") from None
