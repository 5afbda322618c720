"""Facts, probes and rates of hosts before a run, on hosts of namespaces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cluster.hosts.description import Host as Described
from hybridflow.cluster.hosts.network.probe import Probe, unreached
from tests.support.hosts import Host, Hosts, hosts_or_skip
from tests.support.hosts.host import ROOT
from tests.support.hosts.launching import Launch, agent_command, small_run, start

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

INTERFACES = """
import json, socket, sys
from engine3d.errors import UserError
from hybridflow.cluster.hosts.network.interfaces import named
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
from dataclasses import asdict
from pathlib import Path
from hybridflow.cluster.hosts.checks.facts import collect, mark_directory
run_dir, mark = Path(sys.argv[1]), sys.argv[2]
if mark == "make":
    with mark_directory(run_dir) as made:
        print(made, flush=True)
        sys.stdin.read()
else:
    print(json.dumps(asdict(collect(run_dir, head="host-0", mark=Path(mark)))))
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
            results = [json.loads(host.run([*words, mark], cwd=ROOT, check=True).stdout) for host in hosts]
            assert [item["sees_mark"] for item in results] == [True, sees]
            assert not any(lack["what"] == "host names" for of_one in results for lack in of_one["lacks"])
            assert results[0]["run_dir"] == results[1]["run_dir"] == str(directory)
            marking.communicate("", timeout=120)
        assert not any(host.left_files() for host in hosts)
    assert not list(shared.iterdir())


PROBES = """
import json, socket, sys
from dataclasses import asdict
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.probe import answer_probes, probe_pairs
own, port, addresses = int(sys.argv[1]), 29410, sys.argv[2].split(",")
hosts = [Host(index, f"host-{index}", address) for index, address in enumerate(addresses)]
family = socket.AF_INET6 if ":" in addresses[own] else socket.AF_INET
answer_probes(socket.create_server((addresses[own], port), family=family), "x" * 64, own)
print("listens", flush=True)
sys.stdin.readline()
peers = [(host, port) for host in hosts]
print(json.dumps([asdict(probe) for probe in probe_pairs(hosts[own], peers, "x" * 64, 20)]), flush=True)
sys.stdin.readline()
"""


def probed(hosts: Hosts, addresses: list[str]) -> tuple[list[str], list[Probe]]:
    """Lines and probes after every host has tried every other at these addresses."""
    command = [sys.executable, "-c", PROBES]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        host.start([*command, str(index), ",".join(addresses)], cwd=ROOT, **pipes) for index, host in enumerate(hosts)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "listens\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    lines_said = [json.loads(process.stdout.readline()) for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("\n", timeout=120)
    probes = [Probe(**item) for of_one in lines_said for item in of_one]
    described = [Described(index, host.name, addresses[index]) for index, host in enumerate(hosts)]
    return unreached(described, probes), probes


def test_every_host_reaches_every_other_with_ipv4_and_ipv6(hosts: Hosts, ipv6_hosts: Hosts) -> None:
    for those in (hosts, ipv6_hosts):
        lines, probes = probed(those, [host.address for host in those])
        assert lines == []
        assert len(probes) == 6
        assert all(probe.milliseconds is not None and 0 < probe.milliseconds < 500 for probe in probes)


def test_a_wrong_interface_is_found_on_every_pair(two_interfaces: Hosts) -> None:
    lines, _ = probed(two_interfaces, ["192.168.77.10", "192.168.77.11"])
    [line] = lines
    assert line.startswith("host-0 (192.168.77.10) and host-1 (192.168.77.11) do not reach each other: ")
    assert "No route to host" in line or "no answer within 3 s" in line


def test_packets_that_are_lost_one_way_name_both_hosts() -> None:
    with hosts_or_skip(3) as hosts:
        addresses = [host.address for host in hosts]
        for lose in (hosts[2].lose_sent, hosts[2].lose_received):
            lose()
            lines, _ = probed(hosts, addresses)
            [line] = lines
            assert line.startswith("host-2 (10.77.0.12) and the other 2 hosts do not reach each other: ")
            assert "no answer within 3 s" in line or "No route to host" in line
            lose(False)
        # One pair of hosts alone: what host-1 sends to host-2 goes nowhere.
        hosts[1].configure_network(["ip", "route", "add", "blackhole", f"{addresses[2]}/32"])
        lines, _ = probed(hosts, addresses)
        [line] = lines
        assert line.startswith("host-1 (10.77.0.11) and host-2 (10.77.0.12) do not reach each other: ")
        hosts[1].configure_network(["ip", "route", "del", "blackhole", f"{addresses[2]}/32"])
        assert probed(hosts, addresses)[0] == []


RATES = """
import json, os, socket, sys
from dataclasses import asdict
from engine3d.errors import EngineError
from hybridflow.cluster.hosts.network.rate_probe import measure
own, hosts, head, limit_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[5])
os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[4]
family = socket.AF_INET6 if ":" in head else socket.AF_INET
listening = socket.create_server((head, 29411), family=family) if own == 0 else None
try:
    print(json.dumps(asdict(measure(listening, own, hosts, head, 29411, "gloo", limit_s, 1 << 20))))
except EngineError as error:
    print(json.dumps(str(error)))
sys.stdout.flush()
os._exit(0)
"""


def rates(hosts: Hosts, interface: str = "eth0", limit_s: float = 60.0) -> list[Any]:
    command = [sys.executable, "-c", RATES]
    words = [str(len(hosts)), hosts[0].address, interface, str(limit_s)]
    processes = [
        host.start([*command, str(index), *words], cwd=ROOT, stdout=subprocess.PIPE) for index, host in enumerate(hosts)
    ]
    # A measurement that finds nobody ends by its own limit, a minute after the plan's.
    return [json.loads(process.communicate(timeout=limit_s + 180)[0].splitlines()[-1]) for process in processes]


def test_rates_between_hosts_with_ipv4_and_ipv6(hosts: Hosts, ipv6_hosts: Hosts) -> None:
    for those in (hosts, ipv6_hosts):
        for results in rates(those):
            assert (
                results["backend"] == "gloo" and min(results["all_reduce"], results["weights"], results["ring"]) > 0.001
            )
        assert not any(host.processes() or host.left_files() for host in those)


def test_rates_over_a_wrong_interface_end_with_a_line(two_interfaces: Hosts) -> None:
    for line in rates(two_interfaces, "eth1", 8):
        assert isinstance(line, str) and line.startswith("rate between hosts: ") and "\n" not in line
    # Who comes second may find that the first one has given up.
    lines = rates(two_interfaces, "ib7", 8)
    assert "rate between hosts: Unable to find address for: ib7" in lines
    assert all(isinstance(line, str) and line.startswith("rate between hosts: ") for line in lines), lines
    assert not any(host.processes() or host.left_files() for host in two_interfaces)


def agents(hosts: Hosts, directory: Path, interface: str, *words: str) -> Launch:
    """An agent on every host, with an interface by name."""

    def command(index: int) -> list[str]:
        words_of_one = agent_command(index, len(hosts), *words)
        at = words_of_one.index("--host")
        return [*words_of_one[:at], "--interface", interface, *words_of_one[at:]]

    return start(hosts, directory, command)


def test_agents_take_the_interface_that_is_named(tmp_path: Path) -> None:
    with hosts_or_skip(2, shared=tmp_path, dead_end=True) as hosts:
        words = small_run(tmp_path, "placement.actor=cpu:0-99")  # which the driver refuses
        launch = agents(hosts, tmp_path, "eth0", *words)
        assert launch.wait() == [2, 2], launch.outputs()
        assert re.search(r"2 hosts after .*: host-0 \(10\.77\.0\.10\), host-1 \(10\.77\.0\.11\)", launch.output(0))
        launch = agents(hosts, tmp_path, "ib7", *words)
        assert launch.wait() == [2, 2]
        assert launch.output(1).startswith(
            "hybridflow: no interface 'ib7' on this host; it has eth0 (10.77.0.11), eth1"
        )
        launch = agents(hosts, tmp_path, "eth1", *words, "limits.gather_s=4")
        assert launch.wait() == [2, 1]
        assert launch.output(0) == (
            "hybridflow: --interface eth1 (192.168.77.10): the others look for host 0 at host-0, which is 10.77.0.10 "
            "(eth0); expected --head 192.168.77.10 on all hosts\n"
        )
        assert "host 0 at host-0:29400 was not reached from 192.168.77.11 (eth1) within 4 s" in launch.output(1)
