"""What the hosts of a launch find out about themselves and each other before the run begins.

Host 0 asks every agent, compares what they say, and has every pair of hosts try each other; what cannot work ends the
launch, with a line for each thing that is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine3d.errors import UserError
from hybridflow.cluster.devices.gpu_availability import WAIT_S
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.checks.comparison import ClockDifference, Needs, Report, compare
from hybridflow.cluster.hosts.checks.facts import HostFacts, collect, mark_directory, sees_mark
from hybridflow.cluster.hosts.description import Cluster, Host, listed
from hybridflow.cluster.hosts.network.interfaces import Interface
from hybridflow.cluster.hosts.network.network_settings import NetworkConfig, Setting, as_environment, settings_in_force
from hybridflow.cluster.hosts.network.probe import Peer, Probe, Rate, RatePlan, answer_probes, probe_pairs, rate
from hybridflow.cluster.hosts.network.probe import round_trips as told_round_trips
from hybridflow.cluster.hosts.network.probe import unreached as told_unreached
from hybridflow.errors.log import log

FACTS_S, PAIRS_S, RATES_S = 30.0, 30.0, 60.0
_ANSWER_S = 10.0
_CLOCKS = 3
_LOOK_AGAIN_S = 1.0
"""Readings of each host's clock, of which the quickest answer counts."""


@dataclass(frozen=True)
class PreflightPlan:
    """What is looked at.

    Args:
        run_dir: the recipe's.
        recipe: `recipe_hash` of the recipe as this host reads it.
        network: the recipe's.
        needs: of the run.
        pairs: whether every pair of hosts tries each other.
        rates: whether what all hosts reach together is measured, by a process of torch's on each.
    """

    run_dir: Path = Path("runs")
    recipe: str | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    needs: Needs = field(default_factory=Needs)
    pairs: bool = True
    rates: bool = True


class HostPreflight:
    """One host's part: answers what host 0 asks.

    Args:
        plan: of the launch.
        host: this one.
        head: name or address of host 0, as this host was given it.
        token: of the run.
        confined: variables with which what it starts listens where it should; asked for when something starts.
    """

    def __init__(
        self,
        plan: PreflightPlan,
        host: Host,
        head: str,
        token: str,
        confined: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._plan, self._host, self._head, self._token = plan, host, head, token
        self._confined = confined
        self._answering: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None

    @property
    def actions(self) -> dict[str, Callable[..., Awaitable[Message | None]]]:
        """What it can be asked, by the kind of the message."""
        return {
            "clock": self._clock,
            "facts": self._facts,
            "answer_probes": self._answer_probes,
            "probe": self._probe,
            "listen_for_rate": self._listen_for_rate,
            "rate": self._rate,
            "sees_mark": self._sees_mark,
        }

    @property
    def settings(self) -> list[Setting]:
        """The variables of the network that are in force here."""
        interface = None if self._host.interface is None else Interface(self._host.interface, self._host.address)
        return settings_in_force(self._plan.network, interface, os.environ)

    async def close(self) -> None:
        """Answer nobody any more."""
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def _clock(self) -> Message:
        return {"time": time.time()}

    async def _facts(self, mark: str) -> Message:
        plan = self._plan
        found = await asyncio.to_thread(
            collect,
            plan.run_dir,
            plan.recipe,
            head=self._head,
            mark=Path(mark),
            ports=plan.network.port_range,
            address=self._host.address,
        )
        return {"facts": found.as_json()}

    async def _sees_mark(self, mark: str) -> Message:
        return {"sees": await asyncio.to_thread(sees_mark, Path(mark))}

    async def _answer_probes(self) -> Message:
        listening = self._listen()
        port = listening.getsockname()[1]
        self._answering = asyncio.create_task(answer_probes(listening, self._token, self._host.index))
        return {"port": port}

    async def _probe(self, peers: list[dict[str, Any]]) -> Message:
        others = [Peer(Host(**peer["host"]), peer["port"]) for peer in peers]
        return {"probes": [each.as_json() for each in await probe_pairs(self._host, others, self._token, PAIRS_S)]}

    async def _listen_for_rate(self) -> Message:
        self._listening = self._listen()
        return {"port": self._listening.getsockname()[1]}

    async def _rate(self, plan: dict[str, Any]) -> Message:
        listening, self._listening = self._listening, None
        try:
            environment = as_environment(self.settings)
            if self._plan.network.ports is not None:
                environment |= await asyncio.to_thread(self._confined)
            found = await rate(self._host.index, RatePlan(**plan), environment, listening)
        finally:
            if listening is not None:
                listening.close()
        return found.as_json()

    def _listen(self) -> socket.socket:
        """A socket at a free port of this host's address in the cluster."""
        ports = self._plan.network.port_range
        return _listen(self._host.address) if ports is None else ports.listen(self._host.address)


class AsksAgents(Protocol):
    """A host's agent, as far as host 0 asks it."""

    @property
    def host(self) -> Host:
        """The host."""

    async def ask(self, kind: str, limit_s: float, **fields: Any) -> Message:
        """Ask it, for so long; raises EngineError."""


async def check_hosts(members: Sequence[AsksAgents], plan: PreflightPlan, *, with_table: bool) -> list[int]:
    """Compare all hosts, and have every pair try each other, and all together.

    Args:
        members: all hosts, in order.
        plan: of the launch.
        with_table: show the table of hosts also where nothing is wrong.

    Returns:
        The hosts that do not see what host 0 has at `run_dir`.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
        EngineError: a host does not answer.
    """
    began = time.monotonic()
    cluster = Cluster(tuple(member.host for member in members))
    apart = await _compare(members, plan, with_table=with_table)
    if len(members) > 1:
        if plan.pairs:
            await _check_pairs(members, cluster)
        if plan.rates:
            await _check_rate(members, cluster, plan.needs.gpus)
    log.info(f"hosts: checked in {time.monotonic() - began:.1f} s")
    return apart


async def check_newcomer(newcomer: AsksAgents, others: Sequence[AsksAgents], plan: PreflightPlan) -> bool:
    """Compare a host that comes later with the first one, and have it and all others try each other.

    Args:
        newcomer: the host.
        others: those that it is to join, in order.
        plan: of the launch.

    Returns:
        Whether it sees what the first one has at `run_dir`.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
        EngineError: a host does not answer.
    """
    apart = await _compare([others[0], newcomer], plan, with_table=False)
    members = [*others, newcomer]
    await _check_pairs(members, Cluster(tuple(member.host for member in members)))
    return not apart


async def _compare(members: Sequence[AsksAgents], plan: PreflightPlan, *, with_table: bool) -> list[int]:
    """Compare hosts; the numbers of those that do not see what the first one has at `run_dir`."""
    deadline = time.monotonic() + WAIT_S
    while True:
        reports = await _reports(members, plan)
        comparison = compare(reports, plan.needs)
        if with_table or not comparison.may_pass or time.monotonic() >= deadline:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    if with_table or comparison.findings:
        log.info(comparison.table)
    for warning in comparison.warnings:
        log.warning(f"hosts: {warning}")
    if refusals := comparison.refusals:
        raise UserError("\n".join(f"hosts: {each}" for each in refusals))
    return [each.host.index for each in reports if each.facts.sees_mark is False]


async def _reports(members: Sequence[AsksAgents], plan: PreflightPlan) -> list[Report]:
    clocks = await asyncio.gather(*(_clock_of(member) for member in members))
    with mark_directory(plan.run_dir) as mark:
        answers = await asyncio.gather(*(member.ask("facts", FACTS_S, mark=str(mark)) for member in members))
    return [
        Report(member.host, HostFacts.from_json(answer["facts"]), clock if member.host.index else None)
        for member, answer, clock in zip(members, answers, clocks, strict=True)
    ]


async def _clock_of(member: AsksAgents) -> ClockDifference:
    found = []
    for _ in range(_CLOCKS):
        asked = time.time()
        told = (await member.ask("clock", _ANSWER_S))["time"]
        found.append(ClockDifference.measured(asked, told, time.time()))
    return min(found, key=lambda each: each.uncertainty_s)


async def _check_pairs(members: Sequence[AsksAgents], cluster: Cluster) -> None:
    ports = await asyncio.gather(*(member.ask("answer_probes", _ANSWER_S) for member in members))
    hosts = cluster.as_json()
    peers = [{"host": host, "port": answer["port"]} for host, answer in zip(hosts, ports, strict=True)]
    answers = await asyncio.gather(*(member.ask("probe", PAIRS_S + _ANSWER_S, peers=peers) for member in members))
    probes = [Probe.from_json(each) for answer in answers for each in answer["probes"]]
    if lines := told_unreached(cluster.hosts, probes):
        raise UserError("\n".join(f"hosts: {line}" for line in lines))
    log.info(f"hosts: {told_round_trips(cluster.hosts, probes)}")


async def _check_rate(members: Sequence[AsksAgents], cluster: Cluster, gpus: bool) -> None:
    """What all hosts reach together: NCCL between their first GPUs where each has one, gloo otherwise."""
    backend = "nccl" if gpus and all(host.gpus for host in cluster.hosts) else "gloo"
    port = (await members[0].ask("listen_for_rate", _ANSWER_S))["port"]
    plan = RatePlan(len(members), cluster.head.address, port, backend, RATES_S)
    fields = {name: getattr(plan, name) for name in ("hosts", "address", "port", "backend", "limit_s", "nbytes")}
    answers = await asyncio.gather(*(member.ask("rate", RATES_S + 2 * _ANSWER_S, plan=fields) for member in members))
    rates = [Rate.from_json(answer) for answer in answers]
    slowest = min(range(len(rates)), key=lambda index: rates[index].ring)
    before = cluster.hosts[slowest - 1]
    log.info(
        f"hosts: {rates[0].backend}, GB/s of {rates[0].nbytes / 1e6:.0f} MB: all-reduce "
        f"{min(each.all_reduce for each in rates):.2f}, weights from host 0 {min(each.weights for each in rates):.2f}, "
        f"slowest pair {rates[slowest].ring:.2f} ({listed([before.name, cluster.hosts[slowest].name])})"
    )


def _listen(address: str) -> socket.socket:
    """A socket at any free port of an address of this host."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(found[4][:2], family=found[0], backlog=socket.SOMAXCONN)
