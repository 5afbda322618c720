"""Interfaces of this machine; those of hosts that have several are in tests/integration/hosts/test_doctor_parts.py."""

from __future__ import annotations

import socket

import pytest

from engine3d.errors import UserError
from hybridflow.cli import agent
from hybridflow.cluster.hosts.network.interfaces import Interface, all_interfaces, named, route_to


def test_the_loopback_reaches_itself() -> None:
    assert route_to("127.0.0.1") == Interface("lo", "127.0.0.1")
    assert route_to("localhost").name == "lo"
    assert named("lo") == named("lo", socket.AF_INET) == Interface("lo", "127.0.0.1")
    assert "127.0.0.1" in all_interfaces()["lo"]
    assert str(named("lo")) == "lo (127.0.0.1)"


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"^no interface 'ib7' on this host; it has .*lo \(127\.0\.0\.1") as refused:
        named("ib7")
    assert "\n" not in str(refused.value)


def test_a_name_that_does_not_resolve_is_refused() -> None:
    with pytest.raises(UserError, match=r"^no\.such\.host\.invalid does not resolve on this host \("):
        route_to("no.such.host.invalid")


def test_the_cluster_is_not_on_the_loopback() -> None:
    with pytest.raises(UserError, match=r"--interface lo \(127\.0\.0\.1\): other hosts do not reach it"):
        agent._address_of("lo", "no.such.host.invalid")
