"""Ports, and what is in force of the network's settings."""

from __future__ import annotations

import socket

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.hosts.network_settings import PortRange


@pytest.mark.parametrize(("text", "first", "last"), [("29400", 29400, 29400), (" 29400-29499 ", 29400, 29499)])
def test_ports_are_one_or_a_range(text: str, first: int, last: int) -> None:
    found = PortRange.parse(text)
    assert (found.first, found.last, len(found)) == (first, last, last - first + 1)
    assert str(found) == text.strip()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "ports '': expected one or a range, such as 29400 or 29400-29499"),
        ("http", "ports 'http': expected one or a range, such as 29400 or 29400-29499"),
        ("1-2-3", "ports '1-2-3': expected one or a range, such as 29400 or 29400-29499"),
        ("29499-29400", "ports 29499-29400: expected 1024 to 65535, the lower one first"),
        ("80", "ports 80: expected 1024 to 65535, the lower one first"),
        ("70000", "ports 70000: expected 1024 to 65535, the lower one first"),
    ],
)
def test_what_is_no_range_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(UserError) as refused:
        PortRange.parse(text)
    assert str(refused.value) == refusal


def test_the_first_free_port_is_taken_until_none_is_left() -> None:
    first = _free_pair()
    ports = PortRange(first, first + 1)
    assert ports.free("127.0.0.1", 10) == 2 and ports.free("127.0.0.1", 1) == 1
    with ports.listen("127.0.0.1") as one, ports.listen("localhost") as other:
        assert [each.getsockname()[1] for each in (one, other)] == [first, first + 1]
        assert ports.free("127.0.0.1", 10) == 0
        with pytest.raises(UserError) as refused:
            ports.listen("127.0.0.1")
        assert str(refused.value) == (
            f"network.ports: all 2 ports {ports} are in use at 127.0.0.1; expected one that is free"
        )
    with pytest.raises(UserError, match=r"^cannot listen at 192\.0\.2\.77:\d+: "):
        ports.listen("192.0.2.77")


def _free_pair() -> int:
    """The first of two ports that nobody has."""
    for first in range(21000, 29000, 2):
        if PortRange(first, first + 1).free("127.0.0.1", 2) == 2:
            return first
    raise AssertionError("no two free ports")


def test_ports_of_ipv6() -> None:
    try:
        with PortRange(21000, 21999).listen("::1") as listening:
            assert listening.family == socket.AF_INET6
    except UserError as error:
        pytest.skip(str(error))
