"""Rounds of a transfer through staging buffers: the fragments of segments in each round, and their offsets in messages.

Between two participants the segments are one stream of bytes of the targets' dtypes. All pairs of participants take the
same number of rounds and send an equal share of their stream in each, so no rank has more than its share of the round
with the most bytes: no schedule needs fewer rounds. Both ends of a pair compute the same rounds, from sizes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine3d.errors import EngineError
from engine3d.reshard.plan.transfers import Segments

Column = NDArray[np.int64]

STAGING_BYTES = 256 * 10**6
"""Default limit of a rank's memory for all of its message buffers."""

ALIGNMENT = 16
"""Alignment of messages and of cuts in a stream. It leaves every element in one message, aligned as its dtype needs."""

BUFFERS = 4
"""Message buffers: two rounds are in flight at a time, each with a buffer for either direction."""


def count_rounds(sizes: Mapping[tuple[int, int], int], staging_bytes: int) -> int:
    """Count the rounds that a transfer takes.

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
            capacity = staging_bytes // BUFFERS - 2 * ALIGNMENT * peers[rank]
            if capacity <= 0:
                raise EngineError(
                    f"staging of {staging_bytes} bytes is too small for a rank that exchanges weights with "
                    f"{peers[rank]} others: it needs more than {BUFFERS * 2 * ALIGNMENT * peers[rank]}"
                )
            rounds = max(rounds, -(-nbytes // capacity))
    return rounds


def cuts(nbytes: int, rounds: int) -> Column:
    """Cut a pair's stream: round k has its bytes from the k-th entry to the next. [rounds + 1]"""
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
    """Fragments of segments in messages, as columns: `rows` runs of `length` elements, packed without gaps.

    Args:
        segment: index of the segment.
        row, column: the first element's, in the segment.
        round: in which it goes.
        offset: bytes before it in the message of its round.
    """

    segment: Column
    row: Column
    column: Column
    rows: Column
    length: Column
    round: Column
    offset: Column


def fragments(segments: Segments, itemsize: Column, rounds: int) -> Fragments:
    """Cut the stream of a pair's segments into the messages of its rounds.

    Args:
        segments: that go.
        itemsize: bytes of an element of each segment's target.
        rounds: of the complete transfer.
    """
    # Wide elements first: then every element's offset is a multiple of its size.
    order = np.argsort(-itemsize, kind="stable")
    length, itemsize = segments.length[order], itemsize[order]
    nbytes = segments.rows[order] * length * itemsize
    end = np.cumsum(nbytes)
    start = end - nbytes
    cut = cuts(int(nbytes.sum()), rounds)
    first = np.searchsorted(cut, start, side="right") - 1
    count = np.where(nbytes > 0, np.searchsorted(cut, end, side="left") - first, 0)
    of = np.repeat(np.arange(len(order)), count)
    number = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    # From element `low` to element `high` of the segment, counted row by row.
    low = (np.maximum(start[of], cut[number]) - start[of]) // itemsize[of]
    high = (np.minimum(end[of], cut[number + 1]) - start[of]) // itemsize[of]
    width = length[of]
    (low_row, low_column), (high_row, high_column) = np.divmod(low, width), np.divmod(high, width)
    within = low_row == high_row
    full_row = low_row + (low_column > 0)
    sections = (
        # A run inside one row; the end of the first row; complete rows; the beginning of the last row.
        (within & (low < high), low_row, low_column, within, high_column - low_column),
        (~within & (low_column > 0), low_row, low_column, ~within, width - low_column),
        (~within & (high_row > full_row), full_row, 0 * width, high_row - full_row, width),
        (~within & (high_column > 0), high_row, 0 * width, ~within, high_column),
    )
    columns: list[list[Column]] = [[] for _ in range(7)]
    for which, row, column, rows, run in sections:
        segment = of[which]
        values = (
            order[segment],
            row[which],
            column[which],
            rows[which].astype(np.int64),
            run[which],
            number[which],
            start[segment] + (row * width + column)[which] * itemsize[segment] - cut[number[which]],
        )
        for entries, value in zip(columns, values, strict=True):
            entries.append(value)
    return Fragments(*(np.concatenate(column) for column in columns))
