"""Messages between the hosts of a run: a line of JSON each, over a connection whose ends have the run's token.

Both ends prove at the beginning that they know the token without sending it (HMAC-SHA256 of both ends' nonces). The
cluster's network is trusted from then on (docs/security.md): messages are neither encrypted nor signed, and none holds
a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from typing import Any

Message = dict[str, Any]

LINE_BYTES = 1 << 20
"""The `limit` of streams that become channels: bytes of a message."""
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0
_AGENT, _SUPERVISOR = b"agent", b"supervisor"
_REFUSED = b"refused\n"


class ChannelError(Exception):
    """A connection that is gone, or whose other end does not belong to the run."""


class WrongTokenError(ChannelError):
    """The other end has another token, or none."""


class Channel:
    """One end of a connection, after both have proved that they have the token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        with contextlib.suppress(OSError):
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def address(self) -> str:
        """Address of this end."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if name else ""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; on a connection that is gone it is lost, as `receive` will say.

        Args:
            kind: of the message.
            fields: its other values, as JSON has them.
        """
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def receive(self) -> Message:
        """The next message. Raises ChannelError when there will be none."""
        return json.loads(await _line(self._reader))  # type: ignore[no-any-return]

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


async def connect(host: str, port: int, token: str, limit_s: float, local: tuple[str, int] | None = None) -> Channel:
    """Connect an agent to a supervisor.

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
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES, local_addr=local)
            try:
                theirs = await _line(reader)
                mine = secrets.token_hex(_NONCE_BYTES).encode()
                both = theirs.strip() + mine
                writer.write(mine + b" " + _proof(token, _AGENT + both) + b"\n")
                answer = await _line(reader)
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise ChannelError(f"no answer within {limit_s:g} s") from None
    if answer == _REFUSED or not hmac.compare_digest(answer.strip(), _proof(token, _SUPERVISOR + both)):
        writer.close()
        raise WrongTokenError("it has another token")
    return Channel(reader, writer)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> Channel:
    """Accept an agent's connection.

    Raises:
        WrongTokenError: the other end has another token, or none.
        ChannelError: it does not answer.
    """
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            mine = secrets.token_hex(_NONCE_BYTES).encode()
            writer.write(mine + b"\n")
            theirs, _, proof = (await _line(reader)).strip().partition(b" ")
    except TimeoutError:
        raise ChannelError(f"no answer within {_HANDSHAKE_S:g} s") from None
    both = mine + theirs
    if len(theirs) != 2 * _NONCE_BYTES or not hmac.compare_digest(proof, _proof(token, _AGENT + both)):
        writer.write(_REFUSED)
        raise WrongTokenError("it has another token")
    writer.write(_proof(token, _SUPERVISOR + both) + b"\n")
    return Channel(reader, writer)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except (OSError, ValueError) as error:
        raise ChannelError(getattr(error, "strerror", None) or "a line that is too long") from None
    if not line.endswith(b"\n"):
        raise ChannelError("the connection was closed")
    return line


def _proof(token: str, text: bytes) -> bytes:
    return hmac.new(token.encode(), text, "sha256").hexdigest().encode()
