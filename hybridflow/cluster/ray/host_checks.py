"""Checks of a run's nodes before it begins, whoever has started Ray there: comparison, pairs and rates.

What cannot work ends the command, with a line for each thing that is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from engine3d.errors import UserError
from hybridflow.cluster.devices.gpu_availability import WAIT_S
from hybridflow.cluster.hosts.checks.comparison import compare
from hybridflow.cluster.hosts.checks.facts import ClockDifference, HostFacts, Needs, collect, mark_directory
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.network.probe import probe_pairs, round_trips, unreached
from hybridflow.cluster.hosts.run_token import new_token
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray import ray_session
from hybridflow.cluster.ray.node_actors import ask_all, start_actors
from hybridflow.errors.log import log

_FACTS_S, _PAIRS_S, _RATES_S = 30.0, 30.0, 60.0
_ANSWER_S = 10.0
_START_S = 60.0
"""Start of an actor that measures, with the import of torch."""
_SAY_EVERY_S = 10.0
_CLOCKS = 3
"""Readings of each node's clock, of which the quickest answer counts."""


def check_hosts(
    hosts: Sequence[Host],
    run_dir: Path,
    needs: Needs,
    *,
    rates: bool = True,
    limits: LimitsConfig | None = None,
    with_table: bool = False,
) -> None:
    """Compare hosts of this process's session, and have every pair try each other, and all together.

    The session keeps their actors, and which of them do not see the directory of runs. Between nodes of a running
    cluster of which somebody holds a GPU, rates are measured by gloo: NCCL would need memory on the first of each.

    Args:
        hosts: to check, the driver's first.
        run_dir: the recipe's.
        needs: of the run.
        rates: measure what all nodes reach together, by a process of torch's on each.
        limits: `gather_s` bounds the start of the actors; the defaults if None.
        with_table: show the table of hosts also where nothing is wrong.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
        EngineError: a host does not answer.
    """
    began = time.monotonic()
    ray_session.check_ray()
    actors = start_actors(hosts, environments=True)
    _wait_for(actors, (limits or LimitsConfig()).gather_s)
    apart = _compare(actors, run_dir, needs, with_table=with_table)
    if len(actors) > 1:
        _check_pairs(actors)
        if rates:
            _check_rate(hosts, gpus=needs.gpus)
    state = ray_session.session_state()
    state.actors, state.apart = actors, frozenset(apart)
    log.info(f"hosts: checked in {time.monotonic() - began:.1f} s")


def check_this_host(run_dir: Path, needs: Needs) -> None:
    """Check the host of this process as the only one of a run, and show its facts.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
    """
    _judge([collect(run_dir, needs)], needs, with_table=True)


def _wait_for(actors: Mapping[Host, Any], limit_s: float) -> None:
    """Wait until every host has started its actor."""
    began = time.monotonic()
    waiting = {actor.call.remote(time.time): host for host, actor in actors.items()}
    while waiting:
        left_s = began + limit_s - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(_SAY_EVERY_S, max(0.0, left_s)))
        for ref in ready:
            host = waiting.pop(ref)
            ask_all({host: actors[host]}, time.time, _ANSWER_S)
        if waiting:
            names = listed([str(host) for host in waiting.values()])
            log.info(
                f"waiting for {len(waiting)} of {len(actors)} nodes, for {time.monotonic() - began:.0f} s: {names}"
            )
            if left_s <= 0:
                ask_all({host: actors[host] for host in waiting.values()}, time.time, 0.0)


def _compare(actors: Mapping[Host, Any], run_dir: Path, needs: Needs, *, with_table: bool) -> list[int]:
    """Compare nodes; the numbers of those that do not see the directory of runs of the first one."""
    # A run that has just ended may still hold memory; the table shows what is now.
    within_s = 0.0 if with_table or needs.shared_gpus else WAIT_S
    reports = _reports(actors, run_dir, replace(needs, gpus_within_s=within_s))
    _judge(reports, needs, with_table=with_table)
    return [of_one.host.index for of_one in reports if of_one.sees_mark is False]


def _judge(reports: Sequence[HostFacts], needs: Needs, *, with_table: bool) -> None:
    comparison = compare(reports, gpus=needs.gpus)
    if with_table or comparison.findings:
        log.info(comparison.table)
    for warning in comparison.warnings:
        log.warning(f"hosts: {warning}")
    if refusals := comparison.refusals:
        raise UserError("\n".join(f"hosts: {refusal}" for refusal in refusals))


def _reports(actors: Mapping[Host, Any], run_dir: Path, needs: Needs) -> list[HostFacts]:
    hosts = list(actors)
    clocks = [_clock_of(host, actors[host]) if host.index else None for host in hosts]
    with mark_directory(run_dir) as mark:
        given = [(run_dir, needs, hosts[0].name, mark)] * len(hosts)
        collected = ask_all(actors, collect, _FACTS_S + needs.gpus_within_s, given)
    return [
        replace(of_one, host=host, clock=clock) for host, of_one, clock in zip(hosts, collected, clocks, strict=True)
    ]


def _clock_of(host: Host, actor: Any) -> ClockDifference:
    readings = []
    for _ in range(_CLOCKS):
        before = time.time()
        [clock] = ask_all({host: actor}, time.time, _ANSWER_S)
        readings.append(ClockDifference.measured(before, clock, time.time()))
    return min(readings, key=lambda reading: reading.uncertainty_s)


def _check_pairs(actors: Mapping[Host, Any]) -> None:
    secret, hosts = new_token(), list(actors)
    ports = ask_all(actors, "answer_probes", _ANSWER_S, [(secret, host.index) for host in hosts])
    peers = list(zip(hosts, ports, strict=True))
    given = [(host, peers, secret, _PAIRS_S) for host in hosts]
    probes = [probe for of_one in ask_all(actors, probe_pairs, _PAIRS_S + _ANSWER_S, given) for probe in of_one]
    ask_all(actors, "close", _ANSWER_S)
    if lines := unreached(hosts, probes):
        raise UserError("\n".join(f"hosts: {line}" for line in lines))
    log.info(f"hosts: {round_trips(hosts, probes)}")


def _check_rate(hosts: Sequence[Host], *, gpus: bool) -> None:
    """Measure what all hosts reach together: NCCL between their first GPUs where each has a free one, gloo otherwise.

    A measurement may hang in a library: its actors are other processes, and are killed.
    """
    is_free = ray_session.started_hosts() is not None or ray.available_resources().get(
        "GPU", 0
    ) == ray.cluster_resources().get("GPU", 0)
    backend = "nccl" if gpus and is_free and all(host.gpus for host in hosts) else "gloo"
    actors = start_actors(hosts, environments=True)
    try:
        [port] = ask_all({hosts[0]: actors[hosts[0]]}, "listen", _START_S)
        given = [(rank, len(hosts), hosts[0].address, port, backend, _RATES_S) for rank in range(len(hosts))]
        rates = ask_all(actors, "rate", _START_S + _RATES_S, given)
    finally:
        for actor in actors.values():
            ray.kill(actor)
    slowest = min(range(len(rates)), key=lambda index: rates[index].ring)
    log.info(
        f"hosts: {rates[0].backend}, GB/s of {rates[0].nbytes / 1e6:.0f} MB: all-reduce "
        f"{min(rate.all_reduce for rate in rates):.2f}, weights from host 0 {min(rate.weights for rate in rates):.2f}, "
        f"slowest pair {rates[slowest].ring:.2f} ({listed([hosts[slowest - 1].name, hosts[slowest].name])})"
    )
