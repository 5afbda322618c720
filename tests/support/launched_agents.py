"""Launches without hosts: real agents and their supervisor in one event loop, each at an address of its own of the
loopback interface, and a command that does what it is told in place of `hybridflow train`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.cluster.hosts.agent import Agent, Assignment
from hybridflow.cluster.hosts.description import HostRole
from hybridflow.cluster.hosts.launch_plan import LaunchPlan
from hybridflow.cluster.limits import LimitsConfig
from tests.support.warm import warm_python

COMMAND = """
import json, os, pathlib, sys, time
from hybridflow.cluster.driver_link import driver_link, tell_directory, tell_failure

directory, link = pathlib.Path(sys.argv[1]), driver_link()
told = directory / "starts.jsonl"
number = len(told.read_text().splitlines()) if told.exists() else 0
hosts = [[each.index, each.address, each.role] for each in link.hosts]
with told.open("a") as file:
    file.write(json.dumps({"words": sys.argv[2:], "hosts": hosts}) + "\\n")
what, step, line = json.loads((directory / "script.json").read_text())[number]
if what in ("refuse", "early"):
    tell_failure("", line)
    sys.exit(2 if what == "refuse" else 1)
(directory / "failure.json").unlink(missing_ok=True)
tell_directory(directory)
if what in ("lose", "linger"):
    while link.lost is None:
        time.sleep(0.01)
    line = link.lost
    if what == "linger":
        time.sleep(1000)
if what == "end":
    sys.exit(0)
if what == "hang":
    time.sleep(1000)
if what == "slow_end":
    time.sleep(float(line))
    sys.exit(0)
card = {"cause": line, "phase": f"{step}, update", "at": time.time(), "since": time.time()}
(directory / "failure.json").write_text(json.dumps(card))
tell_failure(step, line)
sys.exit(1)
"""


class AgentWithoutRay(Agent):
    """An agent whose host has no Ray."""

    def start_ray(self, cpus: int, gcs_address: str | None = None) -> dict[str, Any]:
        return {"gcs_address": "", "ray_variables": {}, "ray_directory": ""}


@dataclass
class LaunchedAgents:
    """A launch.

    Args:
        directory: for the command's script and what it says.
        plan: of the launch.
        roles: of the hosts; none if empty.
    """

    directory: Path
    plan: LaunchPlan
    roles: Sequence[HostRole | None] = ()
    agents: dict[int, Agent] = field(default_factory=dict)
    codes: dict[int, asyncio.Task[int]] = field(default_factory=dict)
    port: int = 0

    async def start(self) -> None:
        """Start all agents."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        for index in range(self.plan.hosts):
            self.start_agent(index)

    def start_agent(self, index: int, slots: int = 2) -> asyncio.Task[int]:
        """Start the agent of a host, which may have had one before."""
        role = self.roles[index] if self.roles else None
        assignment = Assignment(index, "127.0.0.1", self.port, f"127.0.0.{index + 1}", role=role, cpu_slots=slots)
        self.agents[index] = agent = AgentWithoutRay(assignment, self.plan, "a" * 64)
        self.codes[index] = asyncio.ensure_future(agent.participate())
        return self.codes[index]

    def lose(self, index: int) -> None:
        """Abort the channel of a host."""
        channel = self.agents[index]._channel
        assert channel is not None
        channel.abort()

    def silence(self, index: int) -> None:
        """Drop all messages of a host, which still hears the others."""
        channel = self.agents[index]._channel
        assert channel is not None
        channel.send = lambda kind, **fields: None  # type: ignore[method-assign]

    def starts(self) -> list[dict[str, Any]]:
        """Words and hosts of every start of the command."""
        path = self.directory / "starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def until_started(self, count: int, limit_s: float = 60.0) -> None:
        """Wait until the command has been started so often, and has said so."""
        async with asyncio.timeout(limit_s):
            while len(self.starts()) < count:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)

    async def ended(self, limit_s: float = 60.0) -> list[int]:
        """Exit codes of all agents."""
        async with asyncio.timeout(limit_s):
            return [await self.codes[index] for index in sorted(self.codes)]


def launch_of(
    directory: Path,
    script: Sequence[tuple[str, str, str]],
    *,
    hosts: int,
    roles: Sequence[HostRole | None] = (),
    resume: str = "resume=none",
    restarts: int = 0,
    spares: int = 0,
    **limits: Any,
) -> LaunchedAgents:
    """A launch of which the command does one thing a start: what, in which step, and with which line.

    What is "end", "slow_end" (after so many seconds), "fail", "refuse" (exit code 2), "early" (fail before there is a
    directory), "lose" (fail when a host is lost), "linger" (do not end then) or "hang".
    """
    (directory / "script.json").write_text(json.dumps(list(script)))
    (directory / "command.py").write_text(COMMAND)
    program = [warm_python(), str(directory / "command.py"), str(directory)]
    words = ["train", "recipe.yaml", resume]
    given = LimitsConfig.model_validate({"host_s": 5.0, "stop_s": 0.5, "gather_s": 30.0} | limits)
    plan = LaunchPlan(hosts, words, "one", limits=given, restarts=restarts, spares=spares, program=program)
    return LaunchedAgents(directory, plan, roles=roles)
