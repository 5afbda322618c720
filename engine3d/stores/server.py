"""The server of a store: one thread that keeps keys and values for those who have the key of the run.

Who has proved nothing can make it keep `NONCE_BYTES + PROOF_BYTES` bytes for `PROOF_S` seconds, and one of
`MOST_STRANGERS` connections: the oldest of them goes when there are more.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine3d.stores.wire import (
    LENGTH,
    MOST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    Answer,
    FrameError,
    StoreRequest,
    as_number,
    frame,
    is_proof,
    number,
    proof,
    unframed,
)

PROOF_S = 10.0
"""That a connection has to prove that it has the key."""
MOST_STRANGERS = 128
"""Connections that have not."""
_READ_BYTES = 1 << 16
_LONGEST_WAIT_S = 3600.0
_NO_ROOM_S = 0.1
"""Until it accepts again where this process has no descriptor for a connection."""


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    since: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    proved: bool = False
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    closing: bool = False
    """Once all is sent."""
    waiting: _Waiting | None = None


@dataclass(eq=False)
class _Waiting:
    """A request that is answered when all its keys are there."""

    connection: _Connection
    kind: StoreRequest
    keys: Sequence[bytes]
    missing: set[bytes]


class StoreServer:
    """A store, until `close` or the end of this process.

    Args:
        listening: a socket that listens; it is taken over.
        key: that all who may use it have.
    """

    def __init__(self, listening: socket.socket, key: str) -> None:
        self.host, self.port = listening.getsockname()[:2]
        self._listening, self._key = listening, key.encode()
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Waiting]] = {}
        self._complete: list[_Waiting] = []
        """Whose keys are there now, and who are still to be told."""
        self._deadlines: list[tuple[float, int, _Waiting]] = []
        self._numbers = itertools.count()
        self._strangers: deque[_Connection] = deque()
        self._connections: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._left_s()):
                if key.fileobj is self._woken:
                    self._close_all()
                    return
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._connections:  # it may have been closed since
                    self._serve(key.data)
            self._end_late()

    def _left_s(self) -> float | None:
        """Until something is late, or it is to be looked again: more than 24 days at a time cannot be waited for."""
        ends = [self._strangers[0].since + PROOF_S] if self._strangers else []
        ends += [self._deadlines[0][0]] if self._deadlines else []
        return min(max(0.0, min(ends) - time.monotonic()), _LONGEST_WAIT_S) if ends else None

    def _accept(self) -> None:
        try:
            connection = _Connection(self._listening.accept()[0], time.monotonic())
        except BlockingIOError:
            return
        except OSError:
            if self._strangers:
                self._close(self._strangers[0])
            time.sleep(_NO_ROOM_S)
            return
        connection.socket.setblocking(False)
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(connection)
        self._strangers.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._send(connection, connection.nonce)
        if len(self._strangers) > MOST_STRANGERS:
            self._close(self._strangers[0])

    def _serve(self, connection: _Connection) -> None:
        """Read what is there, answer what is whole of it, and send what can be sent."""
        try:
            data = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            self._send(connection, b"")
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.received += data
        try:
            if connection.proved or self._prove(connection):
                self._answer(connection)
        except FrameError:
            self._close(connection)

    def _prove(self, connection: _Connection) -> bool:
        received = connection.received
        if len(received) < NONCE_BYTES + PROOF_BYTES:
            return False
        nonce, given = bytes(received[:NONCE_BYTES]), bytes(received[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
        del received[: NONCE_BYTES + PROOF_BYTES]
        self._strangers.remove(connection)
        if not is_proof(given, self._key, b"client", connection.nonce, nonce):
            connection.closing = True
            self._send(connection, REFUSED)
            return False
        connection.proved = True
        self._send(connection, proof(self._key, b"server", connection.nonce, nonce))
        return True

    def _answer(self, connection: _Connection) -> None:
        """Answer requests that are whole, one after another."""
        received = connection.received
        while connection.waiting is None and len(received) >= LENGTH.size:
            length = LENGTH.unpack_from(received)[0]
            if length > MOST_BYTES:
                raise FrameError(f"store: a message of {length:,} bytes")
            end = LENGTH.size + length
            if len(received) < end:
                return
            kind, fields = unframed(bytes(received[LENGTH.size : end]))
            del received[:end]
            answer = self._do(connection, kind, fields)
            if answer is not None:
                self._send(connection, answer)
            # After the answer: who has waited may end this process, and who has set the key still wants to hear of it.
            found, self._complete = self._complete, []
            for waiting in found:
                self._send(waiting.connection, self._found(waiting))

    def _do(self, connection: _Connection, kind: int, fields: list[bytes]) -> bytes | None:
        """Do what is asked for; the answer, or None if that comes later."""
        match kind, fields:
            case StoreRequest.SET, [_, _, *_] if len(fields) % 2 == 0:
                for key, value in zip(fields[::2], fields[1::2], strict=True):
                    self._set(key, value)
                return frame(Answer.DONE, [])
            case ((StoreRequest.GET | StoreRequest.WAIT), [limit, *keys]):
                return self._wait(_Waiting(connection, StoreRequest(kind), keys, set()), as_number(limit) / 1000)
            case StoreRequest.CHECK, keys:
                return frame(Answer.DONE, [number(all(key in self._values for key in keys))])
            case StoreRequest.ADD, [key, change]:
                return self._add(key, as_number(change))
            case StoreRequest.COMPARE_SET, [key, expected, wanted]:
                return frame(Answer.DONE, [self._compare_set(key, expected, wanted)])
            case StoreRequest.APPEND, [key, more]:
                self._set(key, self._values.get(key, b"") + more)
                return frame(Answer.DONE, [])
            case StoreRequest.DELETE, [key]:
                return frame(Answer.DONE, [number(self._values.pop(key, None) is not None)])
            case StoreRequest.KEYS, []:
                return frame(Answer.DONE, list(self._values))
        raise FrameError(f"store: a request of kind {kind} with {len(fields)} fields")

    def _add(self, key: bytes, change: int) -> bytes:
        try:
            total = int(self._values.get(key, b"0")) + change
        except ValueError:
            return frame(Answer.WRONG, [f"{key.decode(errors='replace')} is no number".encode()])
        self._set(key, str(total).encode())
        return frame(Answer.DONE, [number(total)])

    def _compare_set(self, key: bytes, expected: bytes, wanted: bytes) -> bytes:
        """As torch's stores do: a key that is not there is set where nothing was expected."""
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._set(key, wanted)
            return wanted
        return expected if value is None else value

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            waiting.missing.discard(key)
            if not waiting.missing and waiting.connection.waiting is waiting:
                waiting.connection.waiting = None
                self._complete.append(waiting)

    def _wait(self, waiting: _Waiting, limit_s: float) -> bytes | None:
        waiting.missing.update(key for key in waiting.keys if key not in self._values)
        if not waiting.missing:
            return self._found(waiting)
        for key in waiting.missing:
            self._waiting.setdefault(key, []).append(waiting)
        waiting.connection.waiting = waiting
        heapq.heappush(self._deadlines, (time.monotonic() + limit_s, next(self._numbers), waiting))
        return None

    def _found(self, waiting: _Waiting) -> bytes:
        if waiting.kind is StoreRequest.WAIT:
            return frame(Answer.DONE, [])
        if gone := [key for key in waiting.keys if key not in self._values]:  # deleted while others were awaited
            return frame(Answer.TIMEOUT, gone[:1])
        return frame(Answer.DONE, [self._values[key] for key in waiting.keys])

    def _end_late(self) -> None:
        now = time.monotonic()
        while self._strangers and self._strangers[0].since + PROOF_S <= now:
            self._close(self._strangers[0])
        while self._deadlines and (self._deadlines[0][0] <= now or self._is_over(self._deadlines[0][2])):
            waiting = heapq.heappop(self._deadlines)[2]
            if not self._is_over(waiting):
                missing = sorted(waiting.missing)
                self._forget(waiting)
                waiting.connection.waiting = None
                self._send(waiting.connection, frame(Answer.TIMEOUT, missing[:1]))

    def _is_over(self, waiting: _Waiting) -> bool:
        return waiting.connection.waiting is not waiting

    def _forget(self, waiting: _Waiting) -> None:
        for key in waiting.missing:
            others = [each for each in self._waiting.get(key, ()) if each is not waiting]
            if others:
                self._waiting[key] = others
            else:
                self._waiting.pop(key, None)

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Send it, or what the connection takes of it now."""
        to_send = connection.to_send
        to_send += data
        try:
            while to_send:
                del to_send[: connection.socket.send(to_send)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if connection.closing and not to_send:
            self._close(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if to_send else 0)
        if connection in self._connections and self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        with contextlib.suppress(ValueError):
            self._strangers.remove(connection)
        waiting, connection.waiting = connection.waiting, None
        if waiting is not None:
            self._forget(waiting)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_all(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        self._selector.close()
        self._listening.close()
        self._woken.close()
