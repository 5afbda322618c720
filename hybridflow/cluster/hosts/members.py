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
        self._answer: asyncio.Future[Message] | None = None
        self.stays = False
        """True if it was there from the beginning, or has a place in the run, and was never gone since."""

    def leave(self) -> None:
        """Note that it is gone: nothing is waited for any more."""
        self.gone.set()
        self.answered({})

    def answered(self, ray: Message) -> None:
        """Note that it has started or ended Ray, or has failed to; values of one that has started."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(ray)

    async def change_ray(self, limit_s: float, cpus: int | None = None, gcs_address: str | None = None) -> Message:
        """Ask it to start Ray, or to end it and all that is left of the run if `cpus` is None. A failure is a loss.

        Args:
            limit_s: of the answer.
            cpus: CPU slots.
            gcs_address: of the cluster that it joins; None for its head.

        Returns:
            Values that `DriverLink` has, of a host that has started Ray.

        Raises:
            EngineError: it is there, and does not answer in time.
        """
        if self.gone.is_set():
            return {}
        self._answer = asyncio.get_running_loop().create_future()
        self.channel.send("ray", cpus=cpus, gcs_address=gcs_address)
        try:
            return await asyncio.wait_for(self._answer, limit_s)
        except TimeoutError:
            what = "end" if cpus is None else "start"
            raise EngineError(f"{self.host}: Ray did not {what} within {limit_s:g} s") from None
