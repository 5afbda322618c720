"""Checks of a run's nodes before it begins, whoever has started Ray there: comparison, pairs and rates.

What cannot work ends the command, with a line for each thing that is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from engine3d.errors import EngineError, UserError
from hybridflow.cluster.devices.gpu_availability import WAIT_S
from hybridflow.cluster.hosts.checks.comparison import ClockDifference, Comparison, Needs, Report, compare
from hybridflow.cluster.hosts.checks.facts import collect, mark_directory
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.network.network_settings import NetworkConfig
from hybridflow.cluster.hosts.network.probe import Peer, RatePlan, round_trips, unreached
from hybridflow.cluster.hosts.run_token import new_token
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray import ray_session
from hybridflow.cluster.ray.cluster_nodes import ClusterNode
from hybridflow.cluster.ray.node_actors import NodeHandle, ask_all, start_actor
from hybridflow.errors.log import log

_FACTS_S, _PAIRS_S, _RATES_S = 30.0, 30.0, 60.0
_ANSWER_S = 10.0
_SAY_EVERY_S = 10.0
_LOOK_AGAIN_S = 1.0
_CLOCKS = 3
"""Readings of each node's clock, of which the quickest answer counts."""


@dataclass(frozen=True)
class HostCheck:
    """Settings of the check.

    Args:
        run_dir: the recipe's.
        network: the recipe's.
        needs: of the run.
        rates: measure what all nodes reach together, by a process of torch's on each.
    """

    run_dir: Path = Path("runs")
    network: NetworkConfig = field(default_factory=NetworkConfig)
    needs: Needs = field(default_factory=Needs)
    rates: bool = True


def check_nodes(
    nodes: Sequence[ClusterNode], plan: HostCheck, *, limits: LimitsConfig | None = None, with_table: bool = False
) -> None:
    """Compare nodes of this process's session, and have every pair try each other, and all together.

    The session keeps their actors, and which of them do not see the directory of runs. Between nodes of a running
    cluster of which somebody holds a GPU, rates are measured by gloo: NCCL would need memory on the first of each.

    Args:
        nodes: to check, the driver's first.
        plan: of the check.
        limits: `gather_s` bounds the start of the actors; the defaults if None.
        with_table: show the table of nodes also where nothing is wrong.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
        EngineError: a node does not answer.
    """
    began = time.monotonic()
    ports = plan.network.port_range
    handles = [
        start_actor(node.node_id, host, ports, index=host.index)
        for node, host in zip(nodes, _hosts(nodes), strict=True)
    ]
    _wait_for(handles, (limits or LimitsConfig()).gather_s)
    apart = _compare(handles, plan, with_table=with_table)
    if len(handles) > 1:
        _check_pairs(handles)
        if plan.rates:
            _check_rate(handles, gpus=plan.needs.gpus)
    state = ray_session.session_state()
    state.checked = {handle.host.index: handle for handle in handles}
    state.apart = frozenset(apart)
    log.info(f"hosts: checked in {time.monotonic() - began:.1f} s")


def check_this_host(run_dir: Path, needs: Needs) -> None:
    """Check the host of this process as the only one of a run, and show its facts.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
    """
    host = Host(0, "this machine", "this machine")
    _judge([Report(host, collect(run_dir))], needs, with_table=True)


def _hosts(nodes: Sequence[ClusterNode]) -> list[Host]:
    """Nodes as the checks count them: hosts of a launch, or nodes of a running cluster, which have no interface.

    Raises:
        EngineError: a host of the launch has no node any more.
    """
    if (hosts := ray_session.started_hosts()) is not None:
        ray_session.check_ray()
        if [node.address for node in nodes] != [host.address for host in hosts]:
            raise EngineError(
                f"Ray's nodes are {listed([node.address for node in nodes])}, expected those of all hosts"
            )
        return list(hosts)
    gpus_are_free = ray.available_resources().get("GPU", 0) == ray.cluster_resources().get("GPU", 0)
    return [
        Host(
            index=node.index,
            name=node.host_name or node.address,
            address=node.address,
            role=node.role,
            gpus=node.node.gpus if gpus_are_free else 0,
            cpu_slots=node.node.cpu_slots,
        )
        for node in nodes
    ]


def _wait_for(handles: Sequence[NodeHandle], limit_s: float) -> None:
    """Wait until every node has started its actor."""
    began = time.monotonic()
    waiting = {handle.actor.clock.remote(): handle for handle in handles}
    while waiting:
        left_s = began + limit_s - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(_SAY_EVERY_S, max(0.0, left_s)))
        for ref in ready:
            ask_all([waiting.pop(ref)], "clock", _ANSWER_S)
        if waiting:
            waited = (
                f"for {time.monotonic() - began:.0f} s: {listed([str(handle.host) for handle in waiting.values()])}"
            )
            log.info(f"waiting for {len(waiting)} of {len(handles)} nodes, {waited}")
            if left_s <= 0:
                ask_all(list(waiting.values()), "clock", 0.0)


def _compare(handles: Sequence[NodeHandle], plan: HostCheck, *, with_table: bool) -> list[int]:
    """Compare nodes; the numbers of those that do not see the directory of runs of the first one."""
    deadline = time.monotonic() + WAIT_S
    while True:
        reports = _reports(handles, plan)
        comparison = compare(reports, plan.needs)
        if with_table or not comparison.may_pass or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_AGAIN_S)
    _judge(reports, plan.needs, with_table=with_table, comparison=comparison)
    return [report.host.index for report in reports if report.properties.sees_mark is False]


def _judge(reports: Sequence[Report], needs: Needs, *, with_table: bool, comparison: Comparison | None = None) -> None:
    comparison = comparison or compare(reports, needs)
    if with_table or comparison.findings:
        log.info(comparison.table)
    for warning in comparison.warnings:
        log.warning(f"hosts: {warning}")
    if refusals := comparison.refusals:
        raise UserError("\n".join(f"hosts: {refusal}" for refusal in refusals))


def _reports(handles: Sequence[NodeHandle], plan: HostCheck) -> list[Report]:
    clocks = [_clock_of(handle) if handle.host.index else None for handle in handles]
    with mark_directory(plan.run_dir) as mark:
        given = (plan.run_dir, handles[0].host.name, mark)
        properties = ask_all(handles, "collect_facts", _FACTS_S, [given] * len(handles))
    return [
        Report(handle.host, of_one, clock) for handle, of_one, clock in zip(handles, properties, clocks, strict=True)
    ]


def _clock_of(handle: NodeHandle) -> ClockDifference:
    readings = []
    for _ in range(_CLOCKS):
        before = time.time()
        [clock] = ask_all([handle], "clock", _ANSWER_S)
        readings.append(ClockDifference.measured(before, clock, time.time()))
    return min(readings, key=lambda reading: reading.uncertainty_s)


def _check_pairs(handles: Sequence[NodeHandle]) -> None:
    secret, hosts = new_token(), [handle.host for handle in handles]
    ports = ask_all(handles, "answer_probes", _ANSWER_S, [(secret, host.index) for host in hosts])
    peers = [Peer(host, port) for host, port in zip(hosts, ports, strict=True)]
    given = [(host, peers, secret, _PAIRS_S) for host in hosts]
    probes = [probe for of_one in ask_all(handles, "probe", _PAIRS_S + _ANSWER_S, given) for probe in of_one]
    ask_all(handles, "close", _ANSWER_S)
    if lines := unreached(hosts, probes):
        raise UserError("\n".join(f"hosts: {line}" for line in lines))
    log.info(f"hosts: {round_trips(hosts, probes)}")


def _check_rate(handles: Sequence[NodeHandle], *, gpus: bool) -> None:
    """Measure what all nodes reach together: NCCL between their first GPUs where each has one, gloo otherwise."""
    hosts = [handle.host for handle in handles]
    backend = "nccl" if gpus and all(host.gpus for host in hosts) else "gloo"
    [port] = ask_all(handles[:1], "listen", _ANSWER_S)
    plan = RatePlan(len(handles), hosts[0].address, port, backend, _RATES_S)
    rates = ask_all(handles, "rate", _RATES_S + 2 * _ANSWER_S, [(rank, plan) for rank in range(len(hosts))])
    slowest = min(range(len(rates)), key=lambda index: rates[index].ring)
    log.info(
        f"hosts: {rates[0].backend}, GB/s of {rates[0].nbytes / 1e6:.0f} MB: all-reduce "
        f"{min(rate.all_reduce for rate in rates):.2f}, weights from host 0 {min(rate.weights for rate in rates):.2f}, "
        f"slowest pair {rates[slowest].ring:.2f} ({listed([hosts[slowest - 1].name, hosts[slowest].name])})"
    )
