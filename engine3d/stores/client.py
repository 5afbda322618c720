"""The client of a store's server: a `torch.distributed.Store` in Python, which torch calls from its own threads too."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from engine3d.stores.wire import (
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    Answer,
    StoreRequest,
    as_number,
    frame,
    is_proof,
    number,
    proof,
    unframed,
)

_GRACE_S = 10.0
"""That the server has to answer, beyond the limit of a wait."""
_AGAIN_S = 0.1
_HANDSHAKE_S = 10.0

_kept: list[RemoteStore] = []
"""All of this process: torch's groups hold a store in C++, which is none once its Python object is gone."""


class RemoteStore(dist.Store):
    """The store of a server elsewhere (`engine3d.stores.server`). Threads may share it.

    Args:
        host, port: of the server.
        key: of the run.
        timeout: limit of every wait for a key, and of the connection.

    Raises:
        RuntimeError: nobody serves there, or the server has another key.
    """

    def __init__(self, host: str, port: int, key: str, timeout: timedelta) -> None:
        super().__init__()
        self._place, self._key = (host, port), key.encode()
        self._free: list[socket.socket] = []
        self._reached = False
        self.set_timeout(timeout)
        self._free.append(self._connected())
        self._reached = True
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask(StoreRequest.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; the sum."""
        return as_number(self._ask(StoreRequest.ADD, [key.encode(), number(amount)])[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(as_number(self._ask(StoreRequest.CHECK, [key.encode() for key in keys])[0]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._await(StoreRequest.WAIT, keys, self._limit if timeout is None else timeout)

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set a value if it is the expected one, or expected to be none; the value from then on."""
        return self._ask(StoreRequest.COMPARE_SET, [key.encode(), _bytes(expected), _bytes(wanted)])[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(as_number(self._ask(StoreRequest.DELETE, [key.encode()])[0]))

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """All keys."""
        return [key.decode() for key in self._ask(StoreRequest.KEYS, [])]

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._ask(StoreRequest.APPEND, [key.encode(), _bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values, once all are there."""
        return self._await(StoreRequest.GET, keys, self._limit)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set values."""
        pairs = zip(keys, values, strict=True)
        self._ask(StoreRequest.SET, [part for key, value in pairs for part in (key.encode(), _bytes(value))])

    def has_extended_api(self) -> bool:
        """That it has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> RemoteStore:
        """Itself: threads may share it."""
        return self

    # The names by which torch calls these from C++.
    deleteKey = delete_key
    getNumKeys = num_keys

    @property
    def _limit(self) -> timedelta:
        """What `set_timeout` has set, which torch also calls from C++."""
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's declarations lack it
        return limit

    def _await(self, kind: StoreRequest, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        milliseconds = timeout // timedelta(milliseconds=1)
        fields = [number(milliseconds), *(key.encode() for key in keys)]
        return self._ask(kind, fields, milliseconds / 1000, keys)

    def _ask(
        self, kind: StoreRequest, fields: Sequence[bytes], limit_s: float = 0.0, keys: Sequence[str] = ()
    ) -> list[bytes]:
        """Ask the server on a connection that no other thread uses meanwhile."""
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._connected()
        try:
            connection.settimeout(limit_s + _GRACE_S)
            connection.sendall(frame(kind, fields))
            answer, found = unframed(_read(connection, LENGTH.unpack(_read(connection, LENGTH.size))[0]))
        except OSError as error:
            connection.close()
            raise dist.DistNetworkError(f"{self}: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)
        if answer == Answer.TIMEOUT:
            named = ", ".join(list(keys)[:4])
            raise dist.DistStoreError(
                f"{self}: wait timeout after {limit_s:g} s, for {found[0].decode(errors='replace')} of {named}"
            )
        if answer != Answer.DONE:
            raise dist.DistStoreError(f"{self}: {found[0].decode(errors='replace')}")
        return found

    def _connected(self) -> socket.socket:
        """A new connection. Who floods the server with others may have it closed, and it is tried again.

        A server that has been there and is gone does not come back. To try again would keep a thread of torch's here
        for as long as the limit, and one that is here when the process ends takes it down with it: SIGSEGV.
        """
        limit_s = self._limit.total_seconds()
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self._proved(max(0.1, min(_HANDSHAKE_S, deadline - time.monotonic())))
            except OSError as error:
                gone = self._reached and isinstance(error, ConnectionRefusedError)
                if gone or time.monotonic() + _AGAIN_S > deadline:
                    why = error.strerror or str(error)
                    within = "any more" if gone else f"within {limit_s:g} s"
                    raise dist.DistNetworkError(f"{self}: not reached {within}: {why}") from error
            time.sleep(_AGAIN_S)

    def _proved(self, limit_s: float) -> socket.socket:
        connection = socket.create_connection(self._place, limit_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, mine = _read(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            connection.sendall(mine + proof(self._key, b"client", theirs, mine))
            answer = _read(connection, PROOF_BYTES)
            if answer == REFUSED or not is_proof(answer, self._key, b"server", theirs, mine):
                raise dist.DistStoreError(f"{self}: its server has another key than this process")
        except BaseException:
            connection.close()
            raise
        return connection

    def __repr__(self) -> str:
        return f"store at {self._place[0]}:{self._place[1]}"


def _read(connection: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise ConnectionResetError(None, "the connection was closed")
        parts += part
    return bytes(parts)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
