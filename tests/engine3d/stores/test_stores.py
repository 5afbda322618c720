"""Where processes meet: a file that only this user may open, or a server at one address of the host."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine3d.stores import file_address, join, listen, serve, tcp_address
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


def test_a_server_listens_at_its_host_address_alone() -> None:
    before = listeners(os.getpid())
    server = serve(listen("127.0.0.1"))
    [listener] = listeners(os.getpid()) - before
    assert (listener.port, listener.only_this_host) == (server.port, True)
    assert listener.address.endswith(("127.0.0.1", "7f00:1"))
    client = join(tcp_address(server.host, server.port), 10.0)
    client.set("key", "value")
    assert join(tcp_address(server.host, server.port), 10.0).get("key") == b"value"
    server.close()
    assert listeners(os.getpid()) == before


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "http://host:80", "tcp://host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected file:///path or tcp://host:port"):
        join(address, 1.0)


def test_addresses() -> None:
    assert tcp_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert tcp_address("fe80::1", 5) == "tcp://[fe80::1]:5"
