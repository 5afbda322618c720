"""Whether every host reaches every other, with the run's token at both ends, and how fast all are together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine3d.errors import EngineError, first_line
from hybridflow.cluster.hosts.channel import Channel, ChannelError, WrongTokenError, accept, connect, stream_limit
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.errors.log import log

PROBE = "probe"
"""The use of the run's token that the probes' is derived for."""
AT_ONCE = 32
"""Connections that a host tries at the same time."""
ATTEMPT_S = 3.0
"""Of one connection: the kernel itself needs three seconds to find that nobody has an address."""
_MOST_LINES = 20
_TAIL = 2000
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A host that answers probes.

    Args:
        host: in the launch.
        port: at which it answers, at its address in the cluster.
    """

    host: Host
    port: int


@dataclass(frozen=True, slots=True)
class Probe:
    """What one host found of another.

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

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probe:
        """What `as_json` gave."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


async def answer_probes(listening: socket.socket, token: str, own: int) -> None:
    """Answer the other hosts' probes until this is cancelled; the socket is closed then.

    Args:
        listening: at this host's address in the cluster.
        token: of the run.
        own: index of this host, which tells another one that has the same address.
    """
    secret = derived(token, PROBE)
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await accept(reader, writer, secret)
        except ChannelError as error:
            if isinstance(error, WrongTokenError):
                log.warning(f"{(writer.get_extra_info('peername') or ['?'])[0]} was refused: {error}")
            writer.close()
            return
        with contextlib.suppress(ChannelError):
            while True:
                await channel.receive()
                channel.send("answer", host=own)
        await channel.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(begin, sock=listening, limit=stream_limit())
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def probe_pairs(own: Host, others: Sequence[Peer], token: str, limit_s: float) -> list[Probe]:
    """Try every other host from this one.

    At most `AT_ONCE` at the same time, and host i begins with host i + 1: all hosts together try every host equally
    often at every moment.

    Args:
        own: this host; connections start from its address.
        others: to try; this host among them is left out.
        token: of the run.
        limit_s: of all together; who was not tried by then is reported as such.

    Returns:
        One probe a host, in the order of the hosts.
    """
    secret = derived(token, PROBE)
    deadline = time.monotonic() + limit_s
    queue = iter(_in_turn(own.index, [peer for peer in others if peer.host.index != own.index]))
    found: list[Probe] = []

    async def try_next() -> None:
        for peer in queue:
            left = min(ATTEMPT_S, deadline - time.monotonic())
            if left <= 0:
                found.append(Probe(own.index, peer.host.index, why=f"not tried within {limit_s:g} s"))
            else:
                found.append(await _probe(own, peer, secret, left))

    await asyncio.gather(*(try_next() for _ in range(min(AT_ONCE, len(others)))))
    return sorted(found, key=lambda each: each.target)


def _in_turn(own: int, others: Sequence[Peer]) -> list[Peer]:
    """Those after this host first, then those before it."""
    ordered = sorted(others, key=lambda peer: peer.host.index)
    return [peer for peer in ordered if peer.host.index > own] + [peer for peer in ordered if peer.host.index < own]


async def _probe(own: Host, peer: Peer, secret: str, limit_s: float) -> Probe:
    channel: Channel | None = None
    try:
        async with asyncio.timeout(limit_s):
            channel = await connect(peer.host.address, peer.port, secret, limit_s, (own.address, 0))
            began = time.perf_counter()
            channel.send("probe")
            answer = await channel.receive()
            # This process's own time counts many connections at once; the kernel's does not.
            seconds = channel.round_trip_s or time.perf_counter() - began
        if answer["host"] != peer.host.index:
            why = f"host {answer['host']} answers at {peer.host.address}, expected host {peer.host.index}"
            return Probe(own.index, peer.host.index, why=why)
        return Probe(own.index, peer.host.index, round(1000 * seconds, 3))
    except TimeoutError:
        why = f"no answer within {limit_s:.0f} s"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else first_line(error)
    except ChannelError as error:
        why = str(error)
    finally:
        if channel is not None:
            await channel.close()
    return Probe(own.index, peer.host.index, why=why)


def unreached(hosts: Sequence[Host], probes: Sequence[Probe]) -> list[str]:
    """Who does not reach whom, and why, in lines; those of hosts that are cut off from all others first.

    Args:
        hosts: in order.
        probes: of all hosts that could tell.
    """
    named = {host.index: host for host in hosts}
    failed = {(each.source, each.target): each.why or "no answer" for each in probes if each.milliseconds is None}
    tried = Counter(index for each in probes for index in (each.source, each.target))
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
    times = {(each.source, each.target): each.milliseconds for each in probes if each.milliseconds is not None}
    if not times:
        return ""
    (source, target), longest = max(times.items(), key=lambda each: each[1])
    return (
        f"round trip of {len(times)} pairs: {statistics.median(times.values()):.2f} ms in the middle, {longest:.2f} ms "
        f"at most ({named[source]} to {named[target]})"
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast all hosts are together, as one of them measured it; GB/s of 10^9 bytes.

    Args:
        backend: "gloo", between memories of hosts, or "nccl", between their first GPUs.
        nbytes: of what was sent.
        all_reduce: bus bandwidth of an all-reduce over all hosts: 2 (n - 1) / n of its bytes over its time.
        weights: of a broadcast from host 0.
        ring: at which this host received from the one before it, while all did the same.
    """

    backend: str
    nbytes: int
    all_reduce: float
    weights: float
    ring: float

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rate:
        """What `as_json` gave."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})


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


async def rate(
    own: int, plan: RatePlan, environment: Mapping[str, str], listening: socket.socket | None = None
) -> Rate:
    """Take part in a measurement, in a process of its own.

    Args:
        own: index of this host.
        plan: the same on every host.
        environment: that names the cluster's interface to gloo and NCCL, as `settings_in_force`.
        listening: the socket of the plan's port, on host 0.

    Raises:
        EngineError: it failed, or did not end in time.
    """
    given = json.dumps(asdict(plan) | {"own": own, "descriptor": None if listening is None else listening.fileno()})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "hybridflow.cluster.hosts.network.rate_probe",
        given,
        stdin=asyncio.subprocess.PIPE,  # its end is the end of the process
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | dict(environment),
        pass_fds=[] if listening is None else [listening.fileno()],
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(plan.limit_s + _END_S):
            assert process.stdout is not None and process.stderr is not None
            out, err, code = await asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
    except TimeoutError:
        raise EngineError(f"rate between hosts: no result within {plan.limit_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code != 0:
        said = err.decode(errors="replace")[-_TAIL:].strip().splitlines()
        raise EngineError(f"rate between hosts: {said[-1] if said else f'the process ended with {code}'}")
    return Rate.from_json(json.loads(out.splitlines()[-1]))
