"""The library that is preloaded into all that a launch starts, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.hosts.network import own_address
from hybridflow.cluster.hosts.network.network_settings import PortRange
from hybridflow.cluster.hosts.network.own_address import needs_library, prepare

pytestmark = pytest.mark.processes

ALL_WAYS = """
import json, socket, sys
found, kept = [], []
def bound(family, *where, reuse_port=False, listens=True):
    one = socket.socket(family)
    kept.append(one)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if where:
        one.bind(where)
    one.listen()
    found.append(one.getsockname()[:2])
try:
    for _ in range(int(sys.argv[1])):
        bound(socket.AF_INET, "0.0.0.0", 0, reuse_port=True)
    bound(socket.AF_INET6, "::", 0)
    bound(socket.AF_INET, "127.0.0.7", 0)
    bound(socket.AF_INET)
    bound(socket.AF_INET, "127.0.0.1", 0)
except OSError as error:
    found.append([error.strerror, 0])
print(json.dumps(found))
"""
OWN = "127.0.0.7"  # stands for an address in a cluster: every host has it


def bound(environment: dict[str, str], count: int = 1) -> tuple[list[list[object]], str]:
    done = subprocess.run(
        [sys.executable, "-c", ALL_WAYS, str(count)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_all_addresses_become_the_clusters_and_others_stay() -> None:
    found, said = bound(prepare(OWN, None).environment({}))
    assert [address for address, _ in found] == [OWN, f"::ffff:{OWN}", OWN, OWN, "127.0.0.1"]
    assert all(port for _, port in found) and said == ""


def test_any_port_becomes_one_of_the_range_and_each_is_given_once() -> None:
    ports = PortRange(31000, 31099)
    found, _ = bound(prepare(OWN, ports).environment({}), count=20)
    taken = [port for address, port in found if address != "127.0.0.1"]
    assert len(taken) == 23 == len(set(taken))
    assert set(taken) <= set(range(ports.first, ports.last + 1))
    assert found[-1][1] not in range(ports.first, ports.last + 1)


HELD = """
import socket
from engine3d.serving.server import _reserve_port
held = _reserve_port("127.0.0.7")
with socket.create_server(held.getsockname()) as own:  # as SGLang does
    print(own.getsockname()[1])
"""


def test_a_server_listens_at_the_port_that_is_held_for_it() -> None:
    environment = os.environ | prepare(OWN, PortRange(31200, 31299)).environment({})
    done = subprocess.run([sys.executable, "-c", HELD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) in range(31200, 31300)


def test_a_range_that_is_used_up_is_named() -> None:
    found, said = bound(prepare(OWN, PortRange(31100, 31103)).environment({}), count=6)
    assert len(found) == 5 and found[-1] == ["Address already in use", 0]
    assert said == "hybridflow: network.ports: all 4 ports 31100-31103 are in use on this host\n"


def test_with_an_ipv6_address_what_is_of_ipv4_alone_stays_within_the_host() -> None:
    found, _ = bound(prepare("::1", None).environment({}))
    assert [address for address, _ in found] == ["127.0.0.1", "::1", OWN, "127.0.0.1", "127.0.0.1"]


def test_other_preloaded_libraries_stay() -> None:
    own = prepare(OWN, None)
    first = own.environment({"LD_PRELOAD": "libother.so"})
    assert first["LD_PRELOAD"] == f"{own.path}:libother.so"
    assert own.environment(first)["LD_PRELOAD"] == first["LD_PRELOAD"]


def test_a_host_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(UserError, match=r"^no C compiler on this host \(no-such-compiler\): "):
        prepare(OWN, None)


def test_where_nobody_else_reaches_nothing_is_needed() -> None:
    assert [needs_library(each) for each in ("127.0.0.1", "::1", "10.0.0.1", "fe80::1%eth0")] == [
        False,
        False,
        True,
        True,
    ]
