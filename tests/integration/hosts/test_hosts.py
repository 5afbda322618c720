"""The hosts that tests are given: that they are apart, that they fail as hosts do, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, HostsUnavailable, hosts_or_skip, make_hosts
from tests.support.hosts.host import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.hosts]

PING = ["ping", "-n", "-q", "-c1", "-W1"]


def answers(hosts: Hosts, one: int, other: str) -> bool:
    return hosts[one].run([*PING, other], timeout_s=10).returncode == 0


def test_each_has_a_name_and_an_address_and_reaches_the_others(hosts: Hosts) -> None:
    for index, host in enumerate(hosts):
        assert host.run(["hostname"]).stdout == f"host-{index}\n"
        assert (
            host.run(["ip", "-brief", "-4", "address", "show", "eth0"]).stdout.split()[2] == f"10.77.0.{10 + index}/24"
        )
        assert host.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        for other in hosts:
            assert host.run(["getent", "hosts", other.name]).stdout.split() == [other.address, other.name]
            assert answers(hosts, index, other.name)
        assert host.run([*PING, "192.0.2.1"]).returncode != 0  # there is no way out


def test_each_has_its_own_processes_and_temporary_files(hosts: Hosts) -> None:
    process = hosts[0].start(["sh", "-c", "touch /tmp/left /dev/shm/left && exec sleep 100"])
    try:
        deadline = time.monotonic() + 100
        while [item.command for item in hosts[0].processes()] != ["sleep 100"]:
            assert time.monotonic() < deadline, hosts[0].processes()
            time.sleep(0.01)
        assert hosts[0].left_files() == [Path("/dev/shm/left"), Path("/tmp/left")]
        assert not hosts[1].processes() and not hosts[1].left_files()
        assert hosts[1].run(["kill", str(process.pid)]).returncode != 0
    finally:
        process.kill()
    assert process.wait(120) == -signal.SIGKILL
    assert not hosts[0].processes()
    hosts[0].run(["rm", "/tmp/left", "/dev/shm/left"], check=True)


def test_what_is_shared_is_seen_by_all_and_what_is_private_by_one(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    for directory in (shared, private):
        directory.mkdir()
    with hosts_or_skip(2, shared=shared, private=[private]) as hosts:
        hosts[0].run(["sh", "-c", f"echo 1 > {shared}/file; echo 1 > {private}/file"], check=True)
        assert hosts[1].run(["ls", shared]).stdout == "file\n"
        assert hosts[1].run(["ls", private]).stdout == ""
        assert hosts[0].path(private / "file").read_text() == "1\n"
        assert hosts[0].left_files() == [private / "file"] and not hosts[1].left_files()
        code = "import hybridflow; print(hybridflow.__file__)"
        assert str(ROOT) in hosts[1].run([sys.executable, "-c", code], cwd=ROOT, check=True).stdout
    assert (shared / "file").exists() and not list(private.iterdir())


def test_sockets_are_those_of_the_host(hosts: Hosts) -> None:
    code = "import socket, time; s = socket.create_server(('{}', 7000)); print(flush=True); time.sleep(100)"
    processes = []
    for host, address in ((hosts[0], "0.0.0.0"), (hosts[1], hosts[1].address)):
        process = host.start([sys.executable, "-c", code.format(address)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        processes.append(process)
    assert [(socket.address, socket.port) for socket in hosts[0].sockets()] == [("0.0.0.0", 7000)]
    assert [(socket.address, socket.port) for socket in hosts[1].sockets()] == [(hosts[1].address, 7000)]
    assert not hosts[2].sockets()
    for process in processes:
        process.kill()
        process.communicate()


def test_udp_sockets_without_a_peer_are_those_of_the_host_too(hosts: Hosts) -> None:
    code = "import socket, time; s = socket.socket(socket.AF_INET{}, socket.SOCK_DGRAM); {}; print(flush=True); {}"
    processes = []
    for family, does in (
        ("", "s.bind(('', 7001))"),
        ("6", "s.bind(('::1', 7002))"),
        ("", f"s.connect(('{hosts[2].address}', 9))"),
    ):
        process = hosts[1].start(
            [sys.executable, "-c", code.format(family, does, "time.sleep(100)")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline()
        processes.append(process)
    results = {(socket.address, socket.port, socket.protocol) for socket in hosts[1].sockets()}
    assert results == {("0.0.0.0", 7001, "udp"), ("::1", 7002, "udp")}
    for process in processes:
        process.kill()
        process.communicate()


def test_ipv6_alone() -> None:
    with hosts_or_skip(2, ipv6=True) as hosts:
        assert hosts[0].run(["getent", "ahosts", "host-1"]).stdout.split()[0] == hosts[1].address == "fd77::11"
        assert hosts[0].run(["ip", "-brief", "-4", "address", "show", "eth0"]).stdout == ""
        assert answers(hosts, 0, "host-1")


def test_a_second_interface_on_which_nobody_is_reached() -> None:
    with hosts_or_skip(2, dead_end=True) as hosts:
        assert hosts[0].run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "eth1", "lo"]
        assert answers(hosts, 0, "host-1")
        assert not answers(hosts, 0, "192.168.77.11")
        assert answers(hosts, 0, "192.168.77.10")


def test_a_link_that_fails_and_packets_lost_one_way() -> None:
    with hosts_or_skip(2) as hosts:
        for break_, mend in (
            (hosts[1].link_down, hosts[1].link_up),
            (hosts[1].lose_received, lambda: hosts[1].lose_received(False)),
            (hosts[1].lose_sent, lambda: hosts[1].lose_sent(False)),
        ):
            break_()
            assert not answers(hosts, 0, "host-1")
            mend()
            end = time.monotonic() + 180
            while not answers(hosts, 0, "host-1"):  # a neighbour is looked for anew
                assert time.monotonic() < end
        # One way: datagrams arrive from a host that hears nothing.
        receive = "import socket; s = socket.socket(type=2); s.bind(('', 7001)); print(flush=True); print(s.recv(9))"
        receiver = hosts[0].start([sys.executable, "-c", receive], stdout=subprocess.PIPE)
        assert receiver.stdout is not None and receiver.stdout.readline()
        hosts[1].lose_received()
        send = "import socket; socket.socket(type=2).sendto(b'word', ('host-0', 7001))"
        hosts[1].run([sys.executable, "-c", send], check=True)
        assert receiver.communicate(timeout=120)[0] == "b'word'\n"


CONNECTS = """
import socket, sys
if sys.argv[1] == "listen":
    server = socket.create_server(("", 7002))
    print(flush=True)
    peer, _ = server.accept()
else:
    peer = socket.create_connection((sys.argv[1], 7002))
print("connected", flush=True)
peer.settimeout(float(sys.argv[2]))
try:
    print("got", peer.recv(1))
except TimeoutError:
    print("silence")
"""


def test_power_off_is_silent() -> None:
    with hosts_or_skip(2) as hosts:
        server = hosts[0].start([sys.executable, "-c", CONNECTS, "listen", "1"], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "\n"
        client = hosts[1].start([sys.executable, "-c", CONNECTS, "host-0", "100"])
        assert server.stdout.readline() == "connected\n"
        began = time.monotonic()
        hosts[1].power_off()
        assert time.monotonic() - began < 80
        assert client.wait(120) == -signal.SIGKILL
        assert not hosts[1].is_up
        assert server.communicate(timeout=120)[0] == "silence\n"
        with pytest.raises(RuntimeError, match="host-1 is not up: no true can start there"):
            hosts[1].start(["true"])
        assert answers(hosts, 0, "host-0")


def test_what_a_command_leaves_ends_with_the_context_at_once() -> None:
    with hosts_or_skip(1) as hosts:
        hosts[0].run(["sh", "-c", "setsid -f sleep 1000; trap '' TERM HUP; setsid -f sleep 1001"], check=True)
        while sorted(process.command for process in hosts[0].processes()) != ["sleep 1000", "sleep 1001"]:
            time.sleep(0.01)
        pid = hosts[0].pid
        began = time.monotonic()
    assert time.monotonic() - began < 200
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_does_not_end_is_named(hosts: Hosts) -> None:
    with pytest.raises(TimeoutError, match=r"host-1: 'sleep 100' did not end within 0.2 s"):
        hosts[1].run(["sleep", "100"], timeout_s=0.2)
    assert not hosts[1].processes()
    with pytest.raises(RuntimeError, match="host-1: 'ls /nowhere' failed with 2: ls: cannot access '/nowhere'"):
        hosts[1].run(["ls", "/nowhere"], check=True)


KILLED = """
import json, time
from tests.support.hosts import make_hosts
with make_hosts(2) as hosts:
    hosts[0].start(["sleep", "1000"])
    print(json.dumps([host.pid for host in hosts]), flush=True)
    time.sleep(1000)
"""


def test_they_end_when_the_test_is_killed(hosts: Hosts) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the hosts outlive the process that made them"
        time.sleep(0.01)


def test_the_machine_is_as_before() -> None:
    def state() -> tuple[str, str, str]:
        links = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
        return links, Path("/proc/self/mountinfo").read_text(), Path("/etc/hosts").read_text()

    before = state()
    with hosts_or_skip(2):
        assert state() == before
    assert state() == before


def test_who_may_not_make_any_is_told_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsUnavailable, match="namespaces are made by root on Linux"), make_hosts(1):
        pass
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsUnavailable, match=r"ip is not installed \(Debian: iproute2\)"), make_hosts(1):
        pass
