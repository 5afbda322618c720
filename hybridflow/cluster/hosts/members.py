"""A host of a launch, from the side of its supervisor."""

from __future__ import annotations

import asyncio
import time

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
        self.recipe: str = hello["recipe"] or ""
        """`recipe_hash` of the recipe that it has read."""
        self.software: str = hello["software"]
        """`software_digest` of it."""
        self.free_ports: int | None = hello["free_ports"]
        """Free ones of `network.ports`, of the first that are needed. None for any ports."""
        self.settings = [NetworkSetting(**setting) for setting in hello["settings"]]
        """Variables of the network in force there."""
        self.seen = time.monotonic()
        self.gone = asyncio.Event()
        """Set once its connection has ended, or has been silent for too long."""
        self.stays = False
        """True if it was there from the beginning, or has a place in the run, and was never gone since."""
