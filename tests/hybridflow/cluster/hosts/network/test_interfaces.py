"""Interfaces of this machine; those of hosts that have several are in tests/integration/hosts/test_doctor_parts.py."""

from __future__ import annotations

import socket

import pytest

from engine3d.errors import UserError
from hybridflow.cli import agent
from hybridflow.cli.agent import _check_head
from hybridflow.cluster.hosts.network import interfaces
from hybridflow.cluster.hosts.network.interfaces import Interface, all_interfaces, named


def test_the_loopback_interface() -> None:
    assert named("lo") == named("lo", socket.AF_INET) == Interface("lo", "127.0.0.1")
    assert "127.0.0.1" in all_interfaces()["lo"]
    assert str(named("lo")) == "lo (127.0.0.1)"


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"^no interface 'ib7' on this host; it has .*lo \(127\.0\.0\.1") as refused:
        named("ib7")
    assert "\n" not in str(refused.value)


def test_host_0_is_looked_for_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {"eth0": ["10.0.0.5"], "ib0": ["10.9.0.5"], "lo": ["127.0.0.1"]}
    monkeypatch.setattr("hybridflow.cli.agent.all_interfaces", lambda: interfaces)
    _check_head("10.9.0.5", "ib0", "10.9.0.5")
    _check_head("192.0.2.7", "ib0", "10.9.0.5")  # of nobody here: perhaps translated on the way
    _check_head("127.0.0.1", "ib0", "10.9.0.5")  # as a host may have it for its own name
    with pytest.raises(
        UserError,
        match=r"--interface ib0 \(10\.9\.0\.5\): the others look for host 0 at 10\.0\.0\.5, which is 10\.0\.0\.5 "
        r"\(eth0\); expected --head 10\.9\.0\.5 on all hosts",
    ):
        _check_head("10.0.0.5", "ib0", "10.9.0.5")


def test_scripts_ask_for_the_address_of_an_interface(capsys: pytest.CaptureFixture[str]) -> None:
    assert interfaces.main("lo") == 0
    assert capsys.readouterr().out == "127.0.0.1\n"
    assert interfaces.main("ib7") == 2
    assert capsys.readouterr().err.startswith("hybridflow: no interface 'ib7' on this host; it has ")


def test_the_cluster_is_not_on_the_loopback() -> None:
    with pytest.raises(UserError, match=r"--interface lo \(127\.0\.0\.1\): other hosts do not reach it"):
        agent._address_of("lo", "no.such.host.invalid")
