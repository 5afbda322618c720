"""What listens where on three hosts, in every phase of a run and of what is looked at before it."""

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


@pytest.mark.parametrize(
    ("ports", "ipv6"),
    [pytest.param(RANGE, False, marks=pytest.mark.release), (None, True)],
    ids=["range-ipv4", "any-ipv6"],
)
def test_a_run_listens_at_the_clusters_address_or_on_loopback(
    tmp_path: Path, ports: PortRange | None, ipv6: bool
) -> None:
    settings = APART if ports is None else [*APART, f"network.ports={ports}"]
    found: list[set[Listener]] = [set(), set(), set()]
    most = [0, 0, 0]
    phases = set()
    with hosts_or_skip(3, shared=tmp_path, ipv6=ipv6) as hosts:
        launch = start_agents(hosts, tmp_path, *settings)
        while any(process.poll() is None for process in launch.processes):
            phases.add(launch.phase().get("phase"))
            for index, host in enumerate(hosts):
                now = host.sockets()
                found[index] |= now
                most[index] = max(most[index], len({each.port for each in now if not each.only_this_host}))
            time.sleep(0.1)
        assert launch.wait() == [0, 0, 0], launch.outputs()
        assert launch.left() == []
        addresses = [ipaddress.ip_address(host.address) for host in hosts]
    print("ports at once:", most)
    assert len(phases) >= 3
    for number, (own, listeners) in enumerate(zip(addresses, found, strict=True)):
        beyond = [each for each in listeners if not each.only_this_host]
        assert [each for each in beyond if _plain(each.address) != own] == []
        names = " ".join(each.process for each in beyond)
        for part in ("rate_probe", "raylet", "hybridflow agent", *(["gcs_server"] if number == 0 else [])):
            assert part in names, (host, beyond)
        if ports is not None:
            allowed = {PORT, *range(ports.first, ports.last + 1)}
            assert [each for each in beyond if each.port not in allowed] == []


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def test_a_range_with_too_few_ports_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path) as hosts:
        launch = start_agents(hosts, tmp_path, "network.ports=31000-31009", "placement.rollout=cpu:4")
        assert launch.wait(90) == [2, 2], launch.outputs()
        line = "hybridflow: hosts: network.ports: 10 free on host-0, host-1; expected at least 64"
        assert line in launch.output(0).splitlines(), launch.outputs()
        assert launch.left() == []
