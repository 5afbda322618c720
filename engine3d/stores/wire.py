"""What a store's server and its clients say to each other: proofs at first, then frames of byte strings.

Both ends prove that they have the key without sending it, by HMAC-SHA256 of the nonces of both:

    server  nonce
    client  nonce, proof
    server  proof, or 32 zero bytes: another key

From then on every request is one frame, and so is its answer. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum

from engine3d.errors import EngineError

NONCE_BYTES = PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)
"""In place of the server's proof."""
MOST_BYTES = 64 << 20
"""Of a frame."""
LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!q")


class StoreRequest(IntEnum):
    """What is asked for, with its fields."""

    SET = 1
    """Keys and values in turn."""
    GET = 2
    """Milliseconds, keys: the values, once all keys are there."""
    WAIT = 3
    """As GET, without the values."""
    CHECK = 4
    """Keys: whether all are there."""
    ADD = 5
    """A key, a number: the sum."""
    COMPARE_SET = 6
    """A key, the value that is expected, the one to be set: the value from then on."""
    APPEND = 7
    """A key, and what its value is to end with."""
    DELETE = 8
    """A key: whether it was there."""
    KEYS = 9
    """All keys."""


class Answer(IntEnum):
    """How a request went."""

    DONE = 1
    TIMEOUT = 2
    """Not all keys were there in time; with one that was not."""
    WRONG = 3
    """No such request, or a value that it cannot have; with the reason."""


class FrameError(EngineError):
    """A frame that is none."""


def proof(key: bytes, sender: bytes, servers_nonce: bytes, clients_nonce: bytes) -> bytes:
    """That the sender, b"server" or b"client", has the key."""
    return hmac.digest(key, b"store " + sender + servers_nonce + clients_nonce, "sha256")


def is_proof(given: bytes, key: bytes, sender: bytes, servers_nonce: bytes, clients_nonce: bytes) -> bool:
    """Whether it is the proof of one who has the key."""
    return hmac.compare_digest(given, proof(key, sender, servers_nonce, clients_nonce))


def frame(kind: int, fields: Sequence[bytes]) -> bytes:
    """A request or an answer with its fields, as it is sent.

    Raises:
        FrameError: it is too long.
    """
    body = b"".join([bytes((kind,)), *(part for field in fields for part in (LENGTH.pack(len(field)), field))])
    if len(body) > MOST_BYTES:
        raise FrameError(f"store: a message of {len(body):,} bytes, expected at most {MOST_BYTES:,}")
    return LENGTH.pack(len(body)) + body


def unframed(body: bytes) -> tuple[int, list[bytes]]:
    """Kind and fields of a frame without its length.

    Raises:
        FrameError: it is none.
    """
    if not body:
        raise FrameError("store: an empty message")
    fields, place = [], 1
    while place < len(body):
        begin = place + LENGTH.size
        if begin > len(body):
            raise FrameError("store: a message that ends in a length")
        place = begin + LENGTH.unpack_from(body, place)[0]
        if place > len(body):
            raise FrameError("store: a message that ends in a field")
        fields.append(body[begin:place])
    return body[0], fields


def number(value: int) -> bytes:
    """A whole number as a field."""
    return _NUMBER.pack(value)


def as_number(field: bytes) -> int:
    """The number in a field.

    Raises:
        FrameError: it holds none.
    """
    if len(field) != _NUMBER.size:
        raise FrameError(f"store: a number of {len(field)} bytes, expected {_NUMBER.size}")
    return int(_NUMBER.unpack(field)[0])
