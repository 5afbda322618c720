"""Messages between the hosts of a run, over one connection each, with proof that both ends have the run's token.

A message is one line: a tag, and a JSON object. Both ends prove at the beginning that they know the token without
sending it (HMAC-SHA256 of both ends' nonces), and derive a key from it that tags every message together with its
number: what somebody on the way changes, repeats or leaves out is found, and ends the connection. Nothing is hidden
from who can listen on the way, so that no message holds a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

Message = dict[str, Any]

_MOST_BYTES = 16 << 20
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0
_AGENT, _SUPERVISOR = "agent", "supervisor"
_REFUSED = b"refused\n"
_LEAST_ROUND_TRIP = 148
"""Where Linux's tcp_info has tcpi_min_rtt, 32 bits of microseconds."""


class ChannelError(Exception):
    """A connection is gone, or who is at its other end is none of ours."""


class WrongTokenError(ChannelError):
    """The other end has another token, or none."""


class Channel:
    """One end of a connection, after both have proved themselves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, me: str) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._me, self._other = me, _SUPERVISOR if me == _AGENT else _AGENT
        self._sent = self._received = 0

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return _host(self._writer.get_extra_info("peername"))

    @property
    def own(self) -> str:
        """Address of this end."""
        return _host(self._writer.get_extra_info("sockname"))

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip of a packet so far, as the kernel measures it; None where it does not say."""
        try:
            connection: socket.socket = self._writer.get_extra_info("socket")
            known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return float(struct.unpack_from("I", known, _LEAST_ROUND_TRIP)[0] / 1e6)
        except (OSError, struct.error):
            return None

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; what is sent on a connection that is gone is lost, as `receive` will say.

        Args:
            kind: of the message.
            fields: its other values, as JSON has them.
        """
        body = json.dumps({"kind": kind, **fields}).encode()
        if len(body) > _MOST_BYTES:
            raise ValueError(f"message {kind} of {len(body):,} bytes, expected at most {_MOST_BYTES:,}")
        tag = self._tag(self._me, self._sent, body)
        self._sent += 1
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(tag + b" " + body + b"\n")

    async def receive(self) -> Message:
        """The next message. Raises ChannelError when there will be none."""
        line = await _line(self._reader)
        tag, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(tag, self._tag(self._other, self._received, body)):
            raise ChannelError("a message that was changed on the way")
        self._received += 1
        return json.loads(body)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Send what is left, for a second at most, and close it."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)

    def abort(self) -> None:
        """Close it at once; what is not sent yet is lost."""
        self._writer.transport.abort()

    def _tag(self, sender: str, number: int, body: bytes) -> bytes:
        return _proof(self._key, f"{sender} {number} ".encode() + body)


async def connect(host: str, port: int, token: str, limit_s: float, local: tuple[str, int] | None = None) -> Channel:
    """The agent's end of a connection to a supervisor.

    Args:
        host, port: where it listens.
        token: of the run.
        limit_s: of one attempt.
        local: own address and port to connect from; any if None.

    Raises:
        OSError: nobody listens there, or it cannot be reached.
        WrongTokenError: it has another token.
        ChannelError: who listens there is none of ours, or does not answer.
    """
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port, limit=2 * _MOST_BYTES, local_addr=local)
            try:
                theirs = await _line(reader)
                mine = secrets.token_hex(_NONCE_BYTES).encode()
                both = theirs.strip() + mine
                writer.write(mine + b" " + _proof(token.encode(), _AGENT.encode() + both) + b"\n")
                answer = await _line(reader)
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise ChannelError(f"no answer within {limit_s:g} s") from None
    if answer == _REFUSED or not hmac.compare_digest(
        answer.strip(), _proof(token.encode(), _SUPERVISOR.encode() + both)
    ):
        writer.close()
        raise WrongTokenError("it has another token")
    _without_delay(writer)
    return Channel(reader, writer, _key(token, both), _AGENT)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Channel:
    """The supervisor's end of a connection that somebody has opened.

    Raises:
        WrongTokenError: they have another token, or none.
        ChannelError: they do not answer.
    """
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            mine = secrets.token_hex(_NONCE_BYTES).encode()
            writer.write(mine + b"\n")
            theirs, _, proof = (await _line(reader)).strip().partition(b" ")
    except TimeoutError:
        raise ChannelError(f"no answer within {_HANDSHAKE_S:g} s") from None
    both = mine + theirs
    if len(theirs) != 2 * _NONCE_BYTES or not hmac.compare_digest(
        proof, _proof(token.encode(), _AGENT.encode() + both)
    ):
        writer.write(_REFUSED)
        raise WrongTokenError("it has another token")
    writer.write(_proof(token.encode(), _SUPERVISOR.encode() + both) + b"\n")
    _without_delay(writer)
    return Channel(reader, writer, _key(token, both), _SUPERVISOR)


def stream_limit() -> int:
    """The `limit` of a server whose connections are given to `accept`, in bytes."""
    return 2 * _MOST_BYTES


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except (OSError, ValueError) as error:
        raise ChannelError(getattr(error, "strerror", None) or "a line that is too long") from None
    if not line.endswith(b"\n"):
        raise ChannelError("the connection was closed")
    return line


def _proof(key: bytes, of: bytes) -> bytes:
    return hmac.new(key, of, hashlib.sha256).hexdigest().encode()


def _key(token: str, both: bytes) -> bytes:
    return hmac.digest(token.encode(), b"messages" + both, "sha256")


def _without_delay(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _host(address: Any) -> str:
    return str(address[0]) if address else ""
