"""Probes between hosts that are addresses of this machine's loopback interface."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.probe import (
    AT_ONCE,
    Peer,
    Probe,
    answer_probes,
    probe_pairs,
    round_trips,
    unreached,
)
from hybridflow.cluster.hosts.network.probe import _in_turn as in_turn
from hybridflow.cluster.hosts.run_token import new_token

TOKEN = new_token()


def hosts_of(count: int) -> list[Host]:
    return [Host(index, f"host-{index}", f"127.0.1.{index + 1}") for index in range(count)]


@contextlib.contextmanager
def answering(hosts: Sequence[Host], secret: str = TOKEN) -> Iterator[list[Peer]]:
    """Hosts that answer, each at its address."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host.address, 0))) for host in hosts]
        for host, listening in zip(hosts, sockets, strict=True):
            answer_probes(listening, secret, host.index)
        yield [(host, item.getsockname()[1]) for host, item in zip(hosts, sockets, strict=True)]
        for listening in sockets:
            listening.shutdown(socket.SHUT_RDWR)


def test_every_host_reaches_every_other() -> None:
    with answering(hosts_of(12)) as peers, ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda peer: probe_pairs(peer[0], peers, TOKEN, 30.0), peers))
    probes = [probe for of_one in results for probe in of_one]
    assert {(item.source, item.target) for item in probes} == {(i, j) for i in range(12) for j in range(12) if i != j}
    assert unreached(hosts_of(12), probes) == []
    assert all(item.milliseconds is not None and item.milliseconds > 0 for item in probes)
    assert round_trips(hosts_of(12), probes).startswith("round trip of 132 pairs: ")


def test_nobody_there_somebody_silent_and_somebody_else() -> None:
    hosts = hosts_of(5)
    nobody = socket.create_server((hosts[1].address, 0))
    gone = nobody.getsockname()[1]
    nobody.close()
    began = time.monotonic()
    with (
        socket.create_server((hosts[2].address, 0)) as mute,
        answering([hosts[3]]) as [peer],
        answering([hosts[4]], new_token()) as [strange],
    ):
        swapped = (Host(9, "host-9", peer[0].address), peer[1])
        peers = [(hosts[1], gone), (hosts[2], mute.getsockname()[1]), peer, strange, swapped]
        refused, silent, right, stranger, other = probe_pairs(hosts[0], peers, TOKEN, 1.0)
    assert time.monotonic() - began < 20
    assert refused.why == "Connection refused"
    assert silent.why == "no answer within 1 s"
    assert right.why is None
    assert stranger.why == "the connection was closed"
    assert other.why == "host 3 answers at 127.0.1.4, expected host 9"


def test_all_that_is_silent_ends_in_time() -> None:
    hosts = hosts_of(3 * AT_ONCE)
    began = time.monotonic()
    with socket.create_server(("127.0.1.2", 0)) as silent:
        port = silent.getsockname()[1]
        peers = [(Host(host.index, host.name, "127.0.1.2"), port) for host in hosts[1:]]
        probes = probe_pairs(hosts[0], peers, TOKEN, 1.0)
    assert time.monotonic() - began < 20
    assert Counter(probe.why for probe in probes) == {
        "no answer within 1 s": AT_ONCE,
        "not tried within 1 s": 3 * AT_ONCE - 1 - AT_ONCE,
    }


def test_512_hosts_try_every_host_equally_often_at_every_moment() -> None:
    hosts = [(Host(index, "", ""), 1) for index in range(512)]
    orders = [
        [peer[0].index for peer in in_turn(source, [peer for peer in hosts if peer[0].index != source])]
        for source in range(512)
    ]
    for step in range(511):
        assert len({order[step] for order in orders}) == 512
    assert all(
        sorted(order) == [index for index in range(512) if index != source] for source, order in enumerate(orders)
    )


def lines(count: int, failed: dict[tuple[int, int], str]) -> list[str]:
    hosts = [Host(index, f"host-{index}", f"10.0.0.{index}") for index in range(count)]
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    return unreached(hosts, [Probe(*pair, None if pair in failed else 1.0, failed.get(pair)) for pair in pairs])


def test_failures_name_both_hosts() -> None:
    slow = "no answer within 3 s"
    assert lines(3, {}) == []
    assert lines(3, {(0, 1): slow}) == ["host-0 (10.0.0.0) does not reach host-1 (10.0.0.1): no answer within 3 s"]
    assert lines(3, {(0, 1): slow, (1, 0): slow}) == [
        "host-0 (10.0.0.0) and host-1 (10.0.0.1) do not reach each other: no answer within 3 s"
    ]
    assert lines(3, {(0, 1): slow, (1, 0): "Connection refused"}) == [
        "host-0 (10.0.0.0) and host-1 (10.0.0.1) do not reach each other: no answer within 3 s; the other way: "
        "Connection refused"
    ]
    assert lines(2, {(0, 1): slow, (1, 0): slow}) == [
        "host-0 (10.0.0.0) and host-1 (10.0.0.1) do not reach each other: no answer within 3 s"
    ]


def test_a_host_that_is_cut_off_is_one_line() -> None:
    of_seven = {pair: "No route to host" for i in range(64) if i != 7 for pair in ((i, 7), (7, i))}
    assert lines(64, of_seven) == ["host-7 (10.0.0.7) and the other 63 hosts do not reach each other: No route to host"]
    assert lines(64, of_seven | {(1, 2): "Connection refused"})[1:] == [
        "host-1 (10.0.0.1) does not reach host-2 (10.0.0.2): Connection refused"
    ]
    assert lines(6, {(0, j): "Connection refused" for j in range(1, 6)}) == [
        "host-0 (10.0.0.0) does not reach host-1 (10.0.0.1), host-2 (10.0.0.2), host-3 (10.0.0.3), host-4 (10.0.0.4) "
        "and 1 more: Connection refused"
    ]


def test_a_network_in_two_halves_is_a_few_lines() -> None:
    halves = {(i, j): "No route to host" for i in range(128) for j in range(128) if (i < 64) != (j < 64)}
    results = lines(128, halves)
    assert results[0] == (
        "host-0 (10.0.0.0) and host-64 (10.0.0.64), host-65 (10.0.0.65), host-66 (10.0.0.66), host-67 (10.0.0.67) "
        "and 60 more do not reach each other: No route to host"
    )
    assert (len(results), results[-1]) == (21, "and 44 more hosts")
