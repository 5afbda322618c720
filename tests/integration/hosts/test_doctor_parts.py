"""What hosts find out about themselves and each other before a run, on hosts of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Host, Hosts, hosts_or_skip
from tests.support.hosts.host import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

INTERFACES = """
import json, socket, sys
from engine3d.errors import UserError
from hybridflow.cluster.hosts.interfaces import named, route_to
try:
    found = eval(sys.argv[1])
    print(json.dumps([found.name, found.address]))
except UserError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def two_interfaces() -> Iterator[Hosts]:
    """Two hosts with an `eth1` that leads nowhere."""
    with hosts_or_skip(2, dead_end=True) as made:
        yield made


@pytest.fixture(scope="module")
def ipv6_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts that have IPv6 alone."""
    with hosts_or_skip(3, shared=tmp_path_factory.mktemp("ipv6"), ipv6=True) as made:
        yield made


def interface(host: Host, expression: str) -> Any:
    """Name and address, or the refusal."""
    return json.loads(host.run([sys.executable, "-c", INTERFACES, expression], cwd=ROOT, check=True).stdout)


def test_the_route_names_the_interface_and_the_source(two_interfaces: Hosts, ipv6_hosts: Hosts) -> None:
    host = two_interfaces[0]
    assert interface(host, 'route_to("host-1")') == ["eth0", "10.77.0.10"]
    assert interface(host, 'route_to("192.168.77.11")') == ["eth1", "192.168.77.10"]
    assert interface(host, 'route_to("host-0")') == ["eth0", "10.77.0.10"]
    assert interface(host, 'route_to("192.0.2.1")') == (
        "no route from this host to 192.0.2.1: Network is unreachable; it has eth0 (10.77.0.10), "
        "eth1 (192.168.77.10), lo (127.0.0.1, ::1)"
    )
    assert interface(ipv6_hosts[1], 'route_to("host-0")') == ["eth0", "fd77::11"]
    assert interface(ipv6_hosts[1], 'route_to("fd77::10")') == ["eth0", "fd77::11"]


def test_interfaces_by_name(two_interfaces: Hosts, ipv6_hosts: Hosts) -> None:
    host = two_interfaces[1]
    assert interface(host, 'named("eth0")') == ["eth0", "10.77.0.11"]
    assert interface(host, 'named("eth1")') == ["eth1", "192.168.77.11"]
    assert "interface eth0 has no IPv6 address; this host has eth0 (10.77.0.11)" in interface(
        host, 'named("eth0", socket.AF_INET6)'
    )
    assert interface(ipv6_hosts[0], 'named("eth0")') == ["eth0", "fd77::10"]
    assert interface(ipv6_hosts[0], 'named("eth0", socket.AF_INET)').startswith("interface eth0 has no IPv4 address")


def test_an_interface_that_is_down_or_has_no_address_is_refused() -> None:
    with hosts_or_skip(1) as [host]:
        host.configure_network(["ip", "link", "add", "bare0", "type", "veth", "peer", "name", "bare1"])
        refused = interface(host, 'named("bare0")')
        assert refused.startswith("interface bare0 is down or has no cable; this host has eth0 (10.77.0.10), lo (")
        for name in ("bare0", "bare1"):
            host.configure_network(["ip", "link", "set", name, "up"])
        assert interface(host, 'named("bare0")').startswith("interface bare0 has no address; this host has eth0")
        host.link_down()
        assert interface(host, 'named("eth0")').startswith("interface eth0 is down or has no cable")


FACTS = """
import json, sys
from pathlib import Path
from hybridflow.cluster.hosts.facts import collect, mark_directory
run_dir, mark = Path(sys.argv[1]), sys.argv[2]
if mark == "make":
    with mark_directory(run_dir) as made:
        print(made, flush=True)
        sys.stdin.read()
else:
    print(json.dumps(collect(run_dir, head="host-0", mark=Path(mark)).as_json()))
"""


def test_hosts_say_whether_they_see_the_same_directory(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    for directory in (shared, private):
        directory.mkdir()
    with hosts_or_skip(2, shared=shared, private=[private]) as hosts:
        for directory, sees in ((shared, True), (private, False)):
            words = [sys.executable, "-c", FACTS, str(directory / "runs")]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            marking = hosts[0].start([*words, "make"], cwd=ROOT, **pipes)
            assert marking.stdout is not None
            mark = marking.stdout.readline().strip()
            found = [json.loads(host.run([*words, mark], cwd=ROOT, check=True).stdout) for host in hosts]
            assert [each["sees_mark"] for each in found] == [True, sees]
            assert [each["name"] for each in found] == ["host-0", "host-1"]
            assert found[1]["resolved"] == {"host-0": ["10.77.0.10"], "host-1": ["10.77.0.11"]}
            assert found[1]["interfaces"]["eth0"] == ["10.77.0.11"]
            assert found[0]["run_dir"] == found[1]["run_dir"] == str(directory)
            marking.communicate("", timeout=10)
        assert not any(host.left_files() for host in hosts)
    assert not list(shared.iterdir())
