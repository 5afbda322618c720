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

from hybridflow.cluster.hosts.checks import preflight
from hybridflow.cluster.hosts.checks.facts import HostFacts, collect, sees_mark
from hybridflow.cluster.hosts.checks.preflight import PreflightPlan
from hybridflow.cluster.hosts.launch.agent import Agent, Place
from hybridflow.cluster.hosts.launch.launch_plan import LaunchPlan
from hybridflow.cluster.hosts.network import probe

ADDRESSES = 250
"""Values of the last byte of an address."""
PROBES_AT_ONCE = 2
"""Probes of each host in flight, instead of the 32 of a host that has its cores for itself: probes time out after 3
seconds.
"""


@dataclass(frozen=True)
class Specification:
    """Agents of one process.

    Args:
        first, count: the agents that it has.
        hosts: of the launch.
        port: at which the first one listens.
        token: of the run.
        directory: of the run.
        pairs: whether all pairs of hosts try each other.
        own_facts: whether every agent looks at this machine; the first one of the process for all otherwise.
        program: the command with its arguments.
    """

    first: int
    count: int
    hosts: int
    port: int
    token: str
    directory: str
    pairs: bool
    own_facts: bool
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
    probe.AT_ONCE = PROBES_AT_ONCE
    if not given.own_facts:
        preflight.collect = _SharedFacts()  # type: ignore[assignment]  # one answer for all
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
        gather_s=300.0,
        lost_s=60.0,
        stop_s=2.0,
        preflight=PreflightPlan(Path(given.directory), pairs=given.pairs, rates=False),
        program=given.program[1:],
    )
    agents = [
        Agent(Place(index, address(0), given.port, address(index), cpu_slots=1), plan, given.token)
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


class _SharedFacts:
    """`collect`, which looks at the machine once and at the mark of every launch anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collected: HostFacts | None = None

    def __call__(self, run_dir: Path, recipe: str | None = None, **where: object) -> HostFacts:
        with self._lock:
            if self._collected is None:
                self._collected = collect(run_dir, recipe, **where)  # type: ignore[arg-type]
        mark = where.get("mark")
        assert mark is None or isinstance(mark, Path)
        return dataclasses.replace(
            self._collected, sees_mark=None if mark is None else sees_mark(mark), time_s=time.time()
        )


if __name__ == "__main__":
    main()
