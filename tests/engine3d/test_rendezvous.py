"""Rendezvous in a file that only this user may open, or at a server at one address of the host."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine3d.rendezvous import PORTS_VARIABLE, file_address, join, listen, serve, tcp_address
from tests.support.listening import listeners


def test_processes_of_a_host_meet_in_a_file_and_nothing_listens(tmp_path: Path) -> None:
    before = listeners(os.getpid())
    address = file_address(tmp_path / "store of a role")
    first, second = join(address, 10.0), join(address, 10.0)
    threading.Timer(0.1, lambda: first.set("key", "value")).start()
    assert second.get("key") == b"value"
    assert listeners(os.getpid()) == before


def test_a_wait_ends_with_its_limit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        join(file_address(tmp_path / "store"), 0.2).get("never set")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_listens_at_one_address_until_it_is_dropped(host: str) -> None:
    before = listeners(os.getpid())
    server = serve(listen(host))
    [listener] = listeners(os.getpid()) - before
    assert (listener.port, listener.only_this_host) == (server.port, True)
    address = tcp_address(host, server.port)
    client = join(address, 10.0)
    client.set("key", "value")
    assert join(address, 10.0).get("key") == b"value"
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        join(address, 0.2).get("never set")
    del server
    assert listeners(os.getpid()) == before
    with pytest.raises(RuntimeError, match=address.rpartition(":")[2]):
        join(address, 0.5)


def test_the_first_free_port_of_a_range_is_taken_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, "21000-29000")
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        ports = [taken.getsockname()[1] for taken in (first, second)]
        assert 21000 <= ports[0] < ports[1] <= 29000
        monkeypatch.setenv(PORTS_VARIABLE, f"{ports[0]}-{ports[0]}")
        with pytest.raises(OSError, match=rf"no free port of {ports[0]}-{ports[0]} \({PORTS_VARIABLE}\) at 127.0.0.1"):
            listen("127.0.0.1")
    with pytest.raises(OSError, match="Cannot assign"):
        listen("192.0.2.77")


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "http://host:80", "tcp://host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected file:///path or tcp://host:port"):
        join(address, 1.0)


def test_addresses() -> None:
    assert tcp_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert tcp_address("fe80::1", 5) == "tcp://[fe80::1]:5"
