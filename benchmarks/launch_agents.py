"""Agents of one launch in one process, for `launch.py`: their hosts are addresses of the loopback interface.

    python benchmarks/launch_agents.py < SPECIFICATION

The first line of standard input is a JSON object (`Specification`); it says "ready", and starts the agents at the line
"go"; at the line "lose" the connection of its first agent breaks. At the end it prints one JSON object (`Report`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from hybridflow.cluster.hosts.agent import Agent, Assignment
from hybridflow.cluster.hosts.launch_plan import LaunchPlan
from hybridflow.cluster.limits import LimitsConfig

ADDRESSES = 250
"""Values of the last byte of an address."""


@dataclass(frozen=True)
class Specification:
    """Agents of one process.

    Args:
        first, count: the agents that it has.
        hosts: of the launch.
        port: at which the first one listens.
        token: of the run.
        directory: of the run.
        program: the command with its arguments.
    """

    first: int
    count: int
    hosts: int
    port: int
    token: str
    directory: str
    program: list[str]


@dataclass(frozen=True)
class Report:
    """Report of one process.

    Args:
        ended: when the last of its agents had, in seconds since the epoch.
        codes: exit codes of its agents.
        cpu_s: of the process, with its imports.
        peak_bytes: resident memory at most.
    """

    ended: float
    codes: list[int]
    cpu_s: float
    peak_bytes: int


def address(index: int) -> str:
    """Address of a host."""
    return f"127.1.{index // ADDRESSES}.{index % ADDRESSES + 1}"


def main() -> None:
    """Take part as the first line of standard input says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what agents say is no answer
    given = Specification(**json.loads(sys.stdin.readline()))
    print("ready", file=answers, flush=True)
    if sys.stdin.readline() != "go\n":
        return
    codes = asyncio.run(_take_part(given))
    used = resource.getrusage(resource.RUSAGE_SELF)
    report = Report(time.time(), codes, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
    print(json.dumps(dataclasses.asdict(report)), file=answers, flush=True)


async def _take_part(given: Specification) -> list[int]:
    plan = LaunchPlan(
        given.hosts,
        given.program[:1],
        limits=LimitsConfig(gather_s=300.0, host_s=60.0, stop_s=2.0),
        program=given.program[1:],
    )
    agents = [
        _AgentWithoutRay(Assignment(index, address(0), given.port, address(index), cpu_slots=1), plan, given.token)
        for index in range(given.first, given.first + given.count)
    ]
    loop = asyncio.get_running_loop()

    def obey() -> None:
        for line in sys.stdin:
            if line == "lose\n":
                loop.call_soon_threadsafe(_lose, agents[0])

    threading.Thread(target=obey, daemon=True).start()
    return await asyncio.gather(*(agent.participate() for agent in agents))


def _lose(agent: Agent) -> None:
    assert agent._channel is not None
    agent._channel.abort()


class _AgentWithoutRay(Agent):
    """An agent whose host has no Ray."""

    def start_ray(self, cpus: int, gcs_address: str | None = None) -> dict[str, object]:
        return {"gcs_address": "", "ray_variables": {}, "ray_directory": ""}


if __name__ == "__main__":
    main()
