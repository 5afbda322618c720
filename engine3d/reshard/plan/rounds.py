"""The rounds of a transfer through staging buffers: what of which piece goes when, and where in its message it lies.

Between two participants the pieces are one stream of bytes of the targets' dtypes. All pairs of participants take the
same number of rounds and send an equal share of their stream in each, so no rank has more than its share of the round
with the most bytes: no schedule needs fewer rounds. Both ends of a pair compute its rounds alike, from sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine3d.errors import EngineError
from engine3d.reshard.plan.pieces import Pieces

Column = NDArray[np.int64]

STAGING_BYTES = 256 * 10**6
"""That a rank may use for all of its buffers, unless told otherwise."""

ALIGNMENT = 16
"""Of messages and of the places where a stream is cut, so that no element is cut and each lies as its dtype needs."""

BUFFERS = 4
"""Two rounds are under way at a time, each with a message buffer for either direction."""


def count_rounds(sizes: Mapping[tuple[int, int], int], staging_bytes: int) -> int:
    """How many rounds a transfer takes.

    Args:
        sizes: (sender, receiver) -> bytes, of all pairs of the transfer.
        staging_bytes: that a rank may use for all of its buffers.

    Raises:
        EngineError: the staging is too small for the number of peers.
    """
    rounds = 0
    for end in (0, 1):
        total: dict[int, int] = {}
        peers: dict[int, int] = {}
        for pair, nbytes in sizes.items():
            if nbytes:
                total[pair[end]] = total.get(pair[end], 0) + nbytes
                peers[pair[end]] = peers.get(pair[end], 0) + 1
        for rank, nbytes in total.items():
            # A message may be longer than its share by what aligns its two ends.
            room = staging_bytes // BUFFERS - 2 * ALIGNMENT * peers[rank]
            if room <= 0:
                raise EngineError(
                    f"staging of {staging_bytes} bytes is too small for a rank that exchanges weights with "
                    f"{peers[rank]} others: it needs more than {BUFFERS * 2 * ALIGNMENT * peers[rank]}"
                )
            rounds = max(rounds, -(-nbytes // room))
    return rounds


def cuts(nbytes: int, rounds: int) -> Column:
    """Where a pair's stream is cut: round k has its bytes from the k-th entry to the next. [rounds + 1]"""
    even = np.arange(rounds + 1, dtype=np.int64) * nbytes // max(1, rounds)
    return np.minimum(nbytes, _aligned(even))


def message_sizes(nbytes: int, rounds: int) -> Column:
    """Bytes of a pair's message in each round, aligned."""
    return _aligned(np.diff(cuts(nbytes, rounds)))


def longest_round(messages: Sequence[int], rounds: int) -> int:
    """Bytes of a participant's messages of one direction together, in the round that has the most.

    Args:
        messages: bytes of all rounds to or from each other participant.
        rounds: of the transfer.
    """
    sizes = sum((message_sizes(nbytes, rounds) for nbytes in messages), start=np.zeros(rounds, dtype=np.int64))
    return int(sizes.max(initial=0))


def _aligned(nbytes: Column) -> Column:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Fragments:
    """What each message has of which piece, as columns: `rows` runs of `length` elements, packed without gaps.

    Args:
        piece: index of the piece.
        row, column: the first element's, in the piece.
        round: in which it goes.
        offset: bytes before it in the message of its round.
    """

    piece: Column
    row: Column
    column: Column
    rows: Column
    length: Column
    round: Column
    offset: Column


def fragments(pieces: Pieces, itemsize: Column, rounds: int) -> Fragments:
    """Cut the stream of a pair's pieces into the messages of its rounds.

    Args:
        pieces: that go.
        itemsize: bytes of an element of each piece's target.
        rounds: of the whole transfer.
    """
    # Wide elements first: then every element's offset is a multiple of its size.
    order = np.argsort(-itemsize, kind="stable")
    length, itemsize = pieces.length[order], itemsize[order]
    nbytes = pieces.rows[order] * length * itemsize
    end = np.cumsum(nbytes)
    start = end - nbytes
    cut = cuts(int(nbytes.sum()), rounds)
    first = np.searchsorted(cut, start, side="right") - 1
    count = np.where(nbytes > 0, np.searchsorted(cut, end, side="left") - first, 0)
    of = np.repeat(np.arange(len(order)), count)
    number = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    # From element `low` to element `high` of the piece, counted row by row.
    low = (np.maximum(start[of], cut[number]) - start[of]) // itemsize[of]
    high = (np.minimum(end[of], cut[number + 1]) - start[of]) // itemsize[of]
    width = length[of]
    (low_row, low_column), (high_row, high_column) = np.divmod(low, width), np.divmod(high, width)
    within = low_row == high_row
    full_row = low_row + (low_column > 0)
    parts = (
        # A run inside one row; the end of the first row; whole rows; the beginning of the last row.
        (within & (low < high), low_row, low_column, within, high_column - low_column),
        (~within & (low_column > 0), low_row, low_column, ~within, width - low_column),
        (~within & (high_row > full_row), full_row, 0 * width, high_row - full_row, width),
        (~within & (high_column > 0), high_row, 0 * width, ~within, high_column),
    )
    columns: list[list[Column]] = [[] for _ in range(7)]
    for which, row, column, rows, run in parts:
        piece = of[which]
        values = (
            order[piece],
            row[which],
            column[which],
            rows[which].astype(np.int64),
            run[which],
            number[which],
            start[piece] + (row * width + column)[which] * itemsize[piece] - cut[number[which]],
        )
        for place, value in zip(columns, values, strict=True):
            place.append(value)
    return Fragments(*(np.concatenate(column) for column in columns))
