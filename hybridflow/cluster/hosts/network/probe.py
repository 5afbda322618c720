"""Probes of every pair of hosts, and the rate that all of them reach together."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from engine3d.errors import EngineError, first_line
from hybridflow.cluster.hosts.description import Host, listed

AT_ONCE = 32
"""Connections that a host tries at the same time."""
ATTEMPT_S = 3.0
"""Limit of one connection: the kernel itself needs three seconds to find that nobody has an address."""
_MOST_LINES = 20
_TAIL = 2000
_END_S = 60.0
_LEAST_ROUND_TRIP = 148
"""Offset of tcpi_min_rtt in Linux's tcp_info, 32 bits of microseconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A host that answers probes.

    Args:
        host: in the cluster.
        port: at which it answers, at its address in the cluster.
    """

    host: Host
    port: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer of one host to another.

    Args:
        source: index of the host that tried.
        target: index of the one that was to answer.
        milliseconds: of the shortest round trip; None if there was no answer.
        why: there was none.
    """

    source: int
    target: int
    milliseconds: float | None = None
    why: str | None = None


def answer_probes(listening: socket.socket, secret: str, source: int) -> None:
    """Answer other hosts' probes, in threads, until the socket is closed.

    Args:
        listening: at this host's address in the cluster.
        secret: of the check; whoever does not know it gets no answer.
        source: index of this host, which tells it from another one that has the same address.
    """

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(ATTEMPT_S)
            if hmac.compare_digest(_line(connection), secret.encode()):
                connection.sendall(f"{source}\n".encode())

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, name="probes", daemon=True).start()


def probe_pairs(source: Host, others: Sequence[Peer], secret: str, limit_s: float) -> list[Probe]:
    """Try every other host from this one.

    At most `AT_ONCE` at the same time, and host i begins with host i + 1: all hosts together try every host equally
    often at every moment.

    Args:
        source: this host; connections start from its address.
        others: to try; this host among them is left out.
        secret: of the check.
        limit_s: of all together; a host that was not tried by then is reported as such.

    Returns:
        One probe a host, in the order of the hosts.
    """
    deadline = time.monotonic() + limit_s

    def probe(peer: Peer) -> Probe:
        left = min(ATTEMPT_S, deadline - time.monotonic())
        if left <= 0:
            return Probe(source.index, peer.host.index, why=f"not tried within {limit_s:g} s")
        return _probe(source, peer, secret, left)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        probes = pool.map(probe, _in_turn(source.index, [peer for peer in others if peer.host.index != source.index]))
        return sorted(probes, key=lambda probe: probe.target)


def _in_turn(source: int, others: Sequence[Peer]) -> list[Peer]:
    """Peers after this host first, then those before it."""
    ordered = sorted(others, key=lambda peer: peer.host.index)
    return [peer for peer in ordered if peer.host.index > source] + [
        peer for peer in ordered if peer.host.index < source
    ]


def _probe(source: Host, peer: Peer, secret: str, limit_s: float) -> Probe:
    began = time.perf_counter()
    try:
        address = (peer.host.address, peer.port)
        with socket.create_connection(address, limit_s, (source.address, 0)) as connection:
            connection.settimeout(limit_s)
            began = time.perf_counter()
            connection.sendall(f"{secret}\n".encode())
            answer = _line(connection)
            # This process's own time counts many connections at once; the kernel's does not.
            seconds = _round_trip_s(connection) or time.perf_counter() - began
        if not answer:
            why = "the connection was closed"
        elif int(answer) != peer.host.index:
            why = f"host {int(answer)} answers at {peer.host.address}, expected host {peer.host.index}"
        else:
            return Probe(source.index, peer.host.index, round(1000 * seconds, 3))
    except TimeoutError:
        why = f"no answer within {limit_s:.0f} s"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else first_line(error)
    return Probe(source.index, peer.host.index, why=why)


def _line(connection: socket.socket) -> bytes:
    """One line without its end; empty if the connection was closed."""
    text = b""
    while not text.endswith(b"\n"):
        data = connection.recv(1024)
        if not data:
            return b""
        text += data
    return text[:-1]


def _round_trip_s(connection: socket.socket) -> float | None:
    """The shortest round trip of a packet by the kernel's measurement; None where it does not say."""
    try:
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return float(struct.unpack_from("I", known, _LEAST_ROUND_TRIP)[0] / 1e6)
    except (OSError, struct.error):
        return None


def unreached(hosts: Sequence[Host], probes: Sequence[Probe]) -> list[str]:
    """Lines about hosts that do not reach each other, and why; those of hosts that are cut off from all others first.

    Args:
        hosts: in order.
        probes: of all hosts that could tell.
    """
    named = {host.index: host for host in hosts}
    failed = {(probe.source, probe.target): probe.why or "no answer" for probe in probes if probe.milliseconds is None}
    tried = Counter(index for probe in probes for index in (probe.source, probe.target))
    lost = Counter(index for pair in failed for index in pair)
    off = [host for host in hosts if 0 < tried[host.index] == lost[host.index] and len(failed) < len(probes)]
    others = f"the other {len(hosts) - 1} hosts do not reach each other"
    lines = [f"{host} and {others}: {_most(host.index, failed)}" for host in off]
    cut = {host.index for host in off}
    said: dict[tuple[int, str, str], list[str]] = {}
    for (source, target), why in sorted(failed.items()):
        back = failed.get((target, source))
        if cut & {source, target} or (back is not None and target < source):
            continue
        reason = why if back in (None, why) else f"{why}; the other way: {back}"
        said.setdefault((source, "" if back is None else "and", reason), []).append(str(named[target]))
    for (source, mutual, why), targets in said.items():
        lines.append(
            f"{named[source]} and {listed(targets)} do not reach each other: {why}"
            if mutual
            else f"{named[source]} does not reach {listed(targets)}: {why}"
        )
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more hosts"]


def _most(index: int, failed: Mapping[tuple[int, int], str]) -> str:
    return statistics.mode(why for pair, why in sorted(failed.items()) if index in pair)


def round_trips(hosts: Sequence[Host], probes: Sequence[Probe]) -> str:
    """Median and longest round trip of all pairs, in a line; empty if there is none."""
    named = {host.index: host.name for host in hosts}
    times = {(probe.source, probe.target): probe.milliseconds for probe in probes if probe.milliseconds is not None}
    if not times:
        return ""
    (source, target), longest = max(times.items(), key=lambda timed: timed[1])
    return (
        f"round trip of {len(times)} pairs: {statistics.median(times.values()):.2f} ms in the middle, {longest:.2f} ms "
        f"at most ({named[source]} to {named[target]})"
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """Rates of all hosts together, as one of them measured them; GB/s of 10^9 bytes.

    Args:
        backend: "gloo", between memories of hosts, or "nccl", between their first GPUs.
        nbytes: sent at once.
        all_reduce: bus bandwidth of an all-reduce over all hosts: 2 (n - 1) / n of its bytes over its time.
        weights: of a broadcast from host 0.
        ring: at which this host received from the one before it, while all did the same.
    """

    backend: str
    nbytes: int
    all_reduce: float
    weights: float
    ring: float


@dataclass(frozen=True, slots=True)
class RatePlan:
    """A measurement in which all hosts take part at the same time.

    Args:
        hosts: how many there are.
        address: of host 0 in the cluster.
        port: at which host 0 has a socket that listens, for the store of its processes.
        backend: "gloo" or "nccl".
        limit_s: until every host has its result.
        nbytes: to be sent at once; None for what suits the backend.
    """

    hosts: int
    address: str
    port: int
    backend: str = "gloo"
    limit_s: float = 60.0
    nbytes: int | None = None


def rate(source: int, plan: RatePlan, environment: Mapping[str, str], listening: socket.socket | None = None) -> Rate:
    """Take part in a measurement, in a process of its own.

    Args:
        source: index of this host.
        plan: the same on every host.
        environment: variables that name the cluster's interface to gloo and NCCL, as `settings_in_force`.
        listening: the socket of the plan's port, on host 0.

    Raises:
        EngineError: it failed, or did not end in time.
    """
    given = json.dumps(asdict(plan) | {"own": source, "descriptor": None if listening is None else listening.fileno()})
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow.cluster.hosts.network.rate_probe", given],
            stdin=reading,  # its end is the end of the process
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment),
            pass_fds=[] if listening is None else [listening.fileno()],
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=plan.limit_s + _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise EngineError(f"rate between hosts: no result within {plan.limit_s:g} s") from None
    finally:
        os.close(reading)
        os.close(writing)
    if process.returncode:
        lines = errors[-_TAIL:].strip().splitlines()
        raise EngineError(f"rate between hosts: {lines[-1] if lines else f'exit code {process.returncode}'}")
    return Rate(**json.loads(output.splitlines()[-1]))
