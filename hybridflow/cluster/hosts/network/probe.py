"""Probes of every pair of hosts."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine3d.errors import first_line
from hybridflow.cluster.hosts.description import Host, listed

AT_ONCE = 32
"""Connections that a host tries at the same time."""
Peer = tuple[Host, int]
"""A host and the port at which it answers probes, at its address in the cluster."""
ATTEMPT_S = 3.0
"""Limit of one connection: the kernel itself needs three seconds to find that nobody has an address."""
_MOST_LINES = 20
_LEAST_ROUND_TRIP = 148
"""Offset of tcpi_min_rtt in Linux's tcp_info, 32 bits of microseconds."""


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


def probe_pairs(source: Host, peers: Sequence[Peer], secret: str, limit_s: float) -> list[Probe]:
    """Try every other host from this one.

    At most `AT_ONCE` at the same time, and host i begins with host i + 1: all hosts together try every host equally
    often at every moment.

    Args:
        source: this host; connections start from its address.
        peers: hosts to try, and the port at which each answers. This host among them is left out.
        secret: of the check.
        limit_s: of all together; a host that was not tried by then is reported as such.

    Returns:
        One probe a host, in the order of the hosts.
    """
    deadline = time.monotonic() + limit_s

    def probe(peer: Peer) -> Probe:
        left = min(ATTEMPT_S, deadline - time.monotonic())
        if left <= 0:
            return Probe(source.index, peer[0].index, why=f"not tried within {limit_s:g} s")
        return _probe(source, *peer, secret, left)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        probes = pool.map(probe, _in_turn(source.index, [peer for peer in peers if peer[0].index != source.index]))
        return sorted(probes, key=lambda probe: probe.target)


def _in_turn(source: int, peers: Sequence[Peer]) -> list[Peer]:
    """Peers after this host first, then those before it."""
    return sorted(peers, key=lambda peer: (peer[0].index < source, peer[0].index))


def _probe(source: Host, target: Host, port: int, secret: str, limit_s: float) -> Probe:
    began = time.perf_counter()
    try:
        with socket.create_connection((target.address, port), limit_s, (source.address, 0)) as connection:
            connection.settimeout(limit_s)
            began = time.perf_counter()
            connection.sendall(f"{secret}\n".encode())
            answer = _line(connection)
            # This process's own time counts many connections at once; the kernel's does not.
            seconds = _round_trip_s(connection) or time.perf_counter() - began
        if not answer:
            why = "the connection was closed"
        elif int(answer) != target.index:
            why = f"host {int(answer)} answers at {target.address}, expected host {target.index}"
        else:
            return Probe(source.index, target.index, round(1000 * seconds, 3))
    except TimeoutError:
        why = f"no answer within {limit_s:.0f} s"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else first_line(error)
    return Probe(source.index, target.index, why=why)


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
