"""Listening sockets on three hosts, in every phase of a run and of the checks before it."""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path

import pytest

from hybridflow.cluster.hosts.network.network_settings import PortRange
from tests.support.hosts import hosts_or_skip
from tests.support.hosts.launching import PORT, start_agents
from tests.support.listening import Listener

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

APART = ["trainer.steps=2", "warmup=null", "placement.actor=cpu:0-1", "placement.rollout=cpu:4,8"]
RANGE = PortRange(31000, 32999)


RAY = ("gcs_server", "raylet", "ray::", "hybridflow train", "hybridflow.cli")
"""Names of Ray's servers, its workers and the driver, which listen on all interfaces."""


@pytest.mark.parametrize(
    ("ports", "ipv6"),
    [pytest.param(RANGE, False, marks=pytest.mark.release), (None, True)],
    ids=["range-ipv4", "any-ipv6"],
)
def test_only_ray_listens_beyond_the_clusters_address(tmp_path: Path, ports: PortRange | None, ipv6: bool) -> None:
    settings = APART if ports is None else [*APART, f"network.ports={ports}"]
    results: list[set[Listener]] = [set(), set(), set()]
    phases = set()
    with hosts_or_skip(3, shared=tmp_path, ipv6=ipv6) as hosts:
        launch = start_agents(hosts, tmp_path, *settings, cold="driver")  # which have names of their own
        while any(process.poll() is None for process in launch.processes):
            phases.add(launch.phase().get("phase"))
            for index, host in enumerate(hosts):
                results[index] |= host.sockets()
            time.sleep(0.1)
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert launch.left() == []
        addresses = [ipaddress.ip_address(host.address) for host in hosts]
    assert len(phases) >= 3
    for number, (own_address, listeners) in enumerate(zip(addresses, results, strict=True)):
        beyond = [listener for listener in listeners if not listener.only_this_host]
        everywhere = [item for item in beyond if _plain(item.address).is_unspecified]
        named = [item for item in everywhere if item.process]  # a process that ends has no name any more
        assert [item for item in named if not any(name in item.process for name in RAY)] == []
        assert [item for item in beyond if item not in everywhere and _plain(item.address) != own_address] == []
        names = " ".join(item.process for item in beyond)
        head = ["gcs_server", "hybridflow agent"] if number == 0 else []
        for server in ("raylet", "ray::NodeActor", *head):
            assert server in names, (host, beyond)
        if ports is not None:
            allowed = {PORT, *range(ports.first, ports.last + 1)}
            assert [item for item in everywhere if item.port not in allowed] == []
            outside = [item.process for item in beyond if item.process and item.port not in allowed]
            libraries = ("ray::", "sglang")  # processes with a group of gloo
            assert [name for name in outside if not any(library in name for library in libraries)] == []


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    results = ipaddress.ip_address(address)
    mapped = results.ipv4_mapped if isinstance(results, ipaddress.IPv6Address) else None
    return mapped or results


def test_a_range_with_too_few_ports_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, "network.ports=31000-31009", "placement.rollout=cpu:4")
        assert launch.wait() == [2, 2], launch.outputs()
        line = "hybridflow: hosts: network.ports: 10 free on host-0, host-1; expected at least 64"
        assert line in launch.output(0).splitlines(), launch.outputs()
        assert launch.left() == []
