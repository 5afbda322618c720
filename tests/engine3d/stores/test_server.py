"""Who has the key uses the store; strangers are refused, and do not keep others from it."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from engine3d.stores import KEY_VARIABLE, join, listen, serve, server, tcp_address
from engine3d.stores.client import RemoteStore
from engine3d.stores.server import StoreServer
from engine3d.stores.wire import LENGTH, NONCE_BYTES, REFUSED, StoreRequest, frame, proof

KEY = secrets.token_hex(32)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    store = serve(listen("127.0.0.1"))
    yield store
    store.close()


def client(served: StoreServer, timeout_s: float = 20.0) -> dist.Store:
    return join(tcp_address(served.host, served.port), timeout_s)


def until(served: socket.socket) -> bytes:
    """All that a server sends until it closes the connection."""
    served.settimeout(20.0)
    data = b""
    try:
        while part := served.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_store_does_what_torchs_own_do(served: StoreServer) -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores: list[Any] = [torchs, client(served)]
    for store in stores:
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert [store.add("a", 5), store.add("count", -2), store.get("count")] == [6, -2, b"-2"]
        assert [store.check(["a"]), store.check(["a", "none"])] == [True, False]
        assert store.compare_set("new", "", "first") == b"first"
        assert store.compare_set("new", "other", "second") == b"first"
        assert store.compare_set("new", "first", "second") == b"second"
        assert store.compare_set("none", "other", "second") == b"other"
        store.append("new", " and more")
        store.multi_set(["x", "y"], ["1", bytes(range(256)).decode("latin1")])
        assert store.multi_get(["x", "new"]) == [b"1", b"second and more"]
        store.wait(["x", "y"], timedelta(seconds=5))
        assert [store.delete_key("x"), store.delete_key("x"), store.check(["x"])] == [True, False, False]
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["y", "never set"], timedelta(milliseconds=50))
        assert store.num_keys() == len([key for key in store.list_keys() if not key.startswith("init/")])


def test_a_wait_ends_when_the_last_key_is_there_and_holds_nobody_up(served: StoreServer) -> None:
    store, found = client(served), []
    waiting = threading.Thread(target=lambda: found.append(store.multi_get(["a", "b"])))
    waiting.start()
    store.set("a", "1")
    time.sleep(0.1)
    assert not found
    store.set("b", "2")
    waiting.join(10)
    assert found == [[b"1", b"2"]]


def test_a_wait_may_have_a_limit_of_years(served: StoreServer) -> None:
    store, found = client(served, 1e8), []
    waiting = threading.Thread(target=lambda: found.append(store.get("late")))
    waiting.start()
    time.sleep(0.2)  # it waits by now
    client(served).set("late", "1")
    waiting.join(10)
    assert found == [b"1"]


def test_large_values_go_through(served: StoreServer) -> None:
    store, value = client(served), secrets.token_bytes(8 << 20)
    store.set("large", value)  # type: ignore[arg-type]
    assert store.multi_get(["large"] * 3) == [value] * 3


def test_who_has_another_key_is_refused_and_at_once(served: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client(served).set("key", "value")
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="its server has another key than this process"):
        client(served, 60.0)
    assert time.monotonic() - begin < 20


def test_a_server_with_another_key_is_told_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told = []

        def pretend() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(secrets.token_bytes(NONCE_BYTES))
                connection.recv(1 << 16)
                connection.sendall(secrets.token_bytes(len(REFUSED)))
                told.append(until(connection))

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(dist.DistStoreError, match="another key"):
            RemoteStore("127.0.0.1", listening.getsockname()[1], KEY, timedelta(seconds=20))
        pretending.join(20)
    assert told == [b""]


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20,
        secrets.token_bytes(200),
        frame(StoreRequest.SET, [b"key", b"changed"]) * 5,
    ],
    ids=["nothing", "http", "noise", "requests"],
)
def test_a_stranger_reads_and_changes_nothing(
    served: StoreServer, says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PROOF_S", 0.3)
    store = client(served)
    store.set("key", "value")
    with socket.create_connection((served.host, served.port)) as stranger:
        stranger.sendall(says)
        assert until(stranger)[NONCE_BYTES:] in (b"", REFUSED)
    assert store.get("key") == b"value"


def test_a_proof_serves_once(served: StoreServer) -> None:
    with socket.create_connection((served.host, served.port)) as first:
        theirs, mine = first.recv(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        good = mine + proof(KEY.encode(), b"client", theirs, mine)
        first.sendall(good)
        assert first.recv(100) == proof(KEY.encode(), b"server", theirs, mine)
    with socket.create_connection((served.host, served.port)) as again:
        again.sendall(good)
        assert until(again)[NONCE_BYTES:] == REFUSED


def test_a_frame_that_is_too_long_or_none_ends_its_connection_alone(served: StoreServer) -> None:
    store = client(served)
    for broken in (
        LENGTH.pack(1 << 31),
        LENGTH.pack(0),
        frame(99, []),
        frame(StoreRequest.SET, [b"key"]),
        b"\0\0\0\2\1\1",
    ):
        with socket.create_connection((served.host, served.port)) as one:
            theirs, mine = one.recv(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            one.sendall(mine + proof(KEY.encode(), b"client", theirs, mine) + broken)
            assert until(one) == proof(KEY.encode(), b"server", theirs, mine)
        store.set("key", "value")
    assert store.get("key") == b"value"


def test_many_strangers_who_say_nothing_keep_nobody_out(served: StoreServer) -> None:
    before = client(served)
    strangers = [socket.create_connection((served.host, served.port)) for _ in range(3 * server.MOST_STRANGERS)]
    try:
        client(served).set("key", "value")
        assert before.get("key") == b"value"
    finally:
        for each in strangers:
            each.close()


def test_who_has_been_connected_hears_at_once_that_the_server_is_gone(served: StoreServer) -> None:
    """A thread of torch's that waited for it when the process ended would take that down."""
    store = client(served)
    store.set("key", "value")
    served.close()
    begin = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"the connection was closed|Connection reset"):
        store.check(["key"])
    with pytest.raises(dist.DistNetworkError, match="not reached any more: Connection refused"):
        store.check(["key"])
    assert time.monotonic() - begin < 10


def test_without_a_key_nobody_serves_or_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(Exception, match=f"{KEY_VARIABLE} is not set"):
        join("tcp://127.0.0.1:1", 1.0)
    with listen("127.0.0.1") as listening, pytest.raises(Exception, match=f"{KEY_VARIABLE} is not set"):
        serve(listening)


def test_who_sets_a_key_hears_of_it_before_who_waits_for_it(
    served: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has waited may end the server's process."""
    told: list[tuple[int, bytes]] = []
    send = served._send

    def recorded(connection: server._Connection, data: bytes) -> None:
        told.append((connection.socket.getpeername()[1], data))
        send(connection, data)

    waiting, setting = client(served), client(served)
    waiter = threading.Thread(target=waiting.wait, args=(["key"], timedelta(seconds=20)))
    waiter.start()
    deadline = time.monotonic() + 20
    while not served._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(served, "_send", recorded)
    setting.set("key", "value")
    waiter.join(20)
    setting_port = setting._free[0].getsockname()[1]  # type: ignore[attr-defined]
    assert [port == setting_port for port, _ in told] == [True, False]
