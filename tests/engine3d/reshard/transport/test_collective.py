"""Transfers through messages: what arrives, how much is staged, and what is said when a peer is gone."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore, Store, TCPStore

from engine3d.errors import EngineError
from engine3d.platform import platform
from engine3d.platform.wire import Wire, WireError
from engine3d.reshard.plan.rounds import ALIGNMENT, BUFFERS, count_rounds, cuts, fragments, message_sizes
from engine3d.reshard.plan.transfers import Segments
from engine3d.reshard.transport.collective import CollectiveTransfer, Incoming, Outgoing
from tests.support.distributed import run_distributed
from tests.support.random_segments import DTYPES, copied, empty_targets, nbytes, random_segments, random_sources

on_cpu = pytest.mark.skipif(platform.device_type != "cpu", reason="a process that has asked for GPUs cannot fork")


def _wire(name: str, timeout_s: float) -> Wire:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    platform.device(rank)
    return platform.wire(PrefixStore(name, _store()), [f"part {number}" for number in range(size)], rank, timeout_s)


def _store() -> Store:
    timeout = timedelta(seconds=60)
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def _segments(pair: tuple[int, int], count: int = 60) -> Segments:
    return random_segments(100 * pair[0] + pair[1], count)


def _transfer(
    wire: Wire, pairs: list[tuple[int, int]], staging_bytes: int
) -> tuple[CollectiveTransfer, list[Incoming]]:
    """Every pair's segments are random, from the sender's buffers to buffers of the pair's own."""
    sizes = {pair: nbytes(_segments(pair)) for pair in pairs}
    device = platform.device(wire.rank)
    sources = [source.to(device) for source in random_sources(wire.rank)]
    outgoing = [
        Outgoing(to, sizes[me, to], _segments((me, to)), sources, DTYPES) for me, to in pairs if me == wire.rank
    ]
    incoming = [
        Incoming(sender, sizes[sender, me], _segments((sender, me)), [target.to(device) for target in empty_targets()])
        for sender, me in pairs
        if me == wire.rank
    ]
    return CollectiveTransfer(wire, count_rounds(sizes, staging_bytes), outgoing, incoming, device), incoming


class _Recorded:
    """Counts what is handed to the wire."""

    def __init__(self, wire: Wire) -> None:
        self.most = 0
        self.buffers: dict[int, int] = {}
        exchange = wire._exchange

        def recorded(
            outgoing: torch.Tensor, incoming: torch.Tensor, outgoing_sizes: list[int], incoming_sizes: list[int]
        ) -> object:
            self.most = max(self.most, sum(outgoing_sizes), sum(incoming_sizes))
            for buffer in (outgoing, incoming):
                self.buffers[buffer.data_ptr()] = buffer.untyped_storage().nbytes()
            return exchange(outgoing, incoming, outgoing_sizes, incoming_sizes)

        wire._exchange = recorded  # type: ignore[method-assign, assignment]


def _run(pairs: list[tuple[int, int]], staging_bytes: int) -> tuple[int, int, int]:
    wire = _wire("test", timeout_s=30)
    recorded = _Recorded(wire)
    transfer, incoming = _transfer(wire, pairs, staging_bytes)
    for version in range(2):
        transfer.run(version)
        platform.synchronize()
        for message in incoming:
            expected = empty_targets()
            copied(message.segments, random_sources(message.sender), expected)
            for made, right in zip(message.targets, expected, strict=True):
                assert torch.equal(made.cpu(), right), (message.sender, made.dtype)
                made.zero_()
    assert sum(recorded.buffers.values()) <= transfer.staged_bytes <= staging_bytes
    assert recorded.most <= staging_bytes // BUFFERS
    wire.close()
    return transfer.rounds, transfer.staged_bytes, transfer.nbytes


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "pairs", "staging_bytes"),
    [
        (4, [(0, 2), (0, 3), (1, 2), (1, 3)], 8192),
        (3, [pair for pair in product(range(3), repeat=2) if pair[0] != pair[1]], 1 << 20),
        (4, [(0, 1), (2, 1)], 4000),
    ],
    ids=["two to two, many rounds", "each to each, one round", "one takes no part"],
)
def test_what_arrives_is_what_the_loop_copies(size: int, pairs: list[tuple[int, int]], staging_bytes: int) -> None:
    if 0 < platform.gpus < size:
        pytest.skip("needs a GPU for each rank")
    results = run_distributed(_run, size, pairs, staging_bytes, timeout_s=300)
    rounds = {rounds for rounds, _, _ in results}
    assert len(rounds) == 1
    sent = sum(sent for _, _, sent in results)
    assert sent == sum(nbytes(_segments(pair)) for pair in pairs)
    # As many as the busiest rank needs, but for what aligns messages.
    busiest = max(
        sum(nbytes(_segments(pair)) for pair in pairs if pair[end] == rank) for end in (0, 1) for rank in range(4)
    )
    assert rounds.pop() <= -(-busiest // (staging_bytes // BUFFERS - 100))


def _failing(timeout_s: float, ends: Literal["killed", "late"]) -> str | None:
    """Stop rank 1 in the third round of the second transfer. Return what the others raise."""
    if ends == "killed" and os.environ["RANK"] == "1":
        # A child of its own is killed, so that the test still hears of this rank.
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return None
    wire = _wire("test", timeout_s)
    transfer, _ = _transfer(wire, [(0, 2), (1, 2), (1, 0)], staging_bytes=4096)
    assert transfer.rounds > 5
    transfer.run(1)
    if wire.rank == 1:
        _stop_in_round_3(wire, (lambda: os.kill(os.getpid(), signal.SIGKILL)) if ends == "killed" else _sleep)
    with pytest.raises(EngineError) as caught:
        transfer.run(2)
    with pytest.raises(EngineError, match="the connection failed before"):
        transfer.run(3)
    return str(caught.value)


def _sleep() -> None:
    time.sleep(12)


def _stop_in_round_3(wire: Wire, stop: Callable[[], None]) -> None:
    begin, calls = wire._exchange, iter(range(100))

    def stopping(*arguments: Any) -> Any:
        if next(calls) == 2:
            stop()
        return begin(*arguments)

    wire._exchange = stopping  # type: ignore[method-assign, assignment]


@pytest.mark.processes
@on_cpu
def test_a_peer_that_is_killed_is_named_at_once() -> None:
    results = run_distributed(_failing, 3, 500.0, "killed", timeout_s=300)
    for rank in (0, 2):
        gone = rf"part {rank}: weights of version 2, round [234] of \d+: .*part 1.* is gone \("
        assert re.match(gone, results[rank]), results
        assert "\n" not in results[rank]


@pytest.mark.processes
@on_cpu
def test_a_peer_that_is_late_is_named_within_the_limit() -> None:
    results = run_distributed(_failing, 3, 4.0, "late", timeout_s=300)
    messages = [results[rank] for rank in (0, 2)]
    assert any("part 1 did not answer within 4 s" in message for message in messages), messages
    assert all(re.search(r"version 2, round [234] of", message) for message in messages)


def _meeting() -> str:
    if os.environ["RANK"] == "1":
        time.sleep(3)
        return ""
    with pytest.raises(WireError) as caught:
        _wire("test", timeout_s=1)
    return str(caught.value)


@pytest.mark.processes
@on_cpu
def test_a_participant_that_does_not_come_is_named() -> None:
    assert run_distributed(_meeting, 2, timeout_s=300)[0] == "part 1 did not come within 1 s"


def _connecting_often() -> int:
    """Wires that are closed as soon as they are made."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store()
    names = [f"part {number}" for number in range(size)]
    for number in range(40):
        platform.wire(PrefixStore(f"wire {number}", store), names, rank, 30).close()
    return number


@pytest.mark.processes
@on_cpu
def test_one_that_closes_at_once_breaks_no_connection_that_another_still_makes() -> None:
    assert run_distributed(_connecting_often, 4, timeout_s=300) == [39] * 4


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("seed", range(4))
def test_fragments_are_the_segments_in_order(seed: int, rounds: int) -> None:
    """Written into a stream by fragments, and by segments with the widest dtypes first, the elements are the same."""
    segments = random_segments(seed, count=30)
    itemsize = np.array([dtype.itemsize for dtype in DTYPES])[segments.target_buffer]
    total = nbytes(segments)
    stream = []
    for number in sorted(range(len(segments)), key=lambda n: -itemsize[n]):
        elements = [
            (number, row, column) for row in range(segments.rows[number]) for column in range(segments.length[number])
        ]
        stream += [element for element in elements for _ in range(itemsize[number])]
    made: list[tuple[int, int, int] | None] = [None] * total
    message_fragments, cut = fragments(segments, itemsize, rounds), cuts(total, rounds)
    for n in range(len(message_fragments.segment)):
        segment, size = int(message_fragments.segment[n]), int(itemsize[message_fragments.segment[n]])
        assert message_fragments.offset[n] % size == 0
        position = int(cut[message_fragments.round[n]] + message_fragments.offset[n])
        for row in range(message_fragments.rows[n]):
            for column in range(message_fragments.length[n]):
                for _ in range(size):
                    assert made[position] is None
                    made[position] = (
                        segment,
                        int(message_fragments.row[n]) + row,
                        int(message_fragments.column[n]) + column,
                    )
                    position += 1
        assert position <= cut[message_fragments.round[n] + 1]
    assert made == stream


def test_rounds_keep_every_rank_within_its_staging() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        size = int(random.integers(2, 9))
        pairs = [(one, other) for one, other in product(range(size), repeat=2) if one != other]
        sizes = {pair: int(random.integers(0, 5000)) * 2 for pair in pairs if random.random() < 0.6}
        staging = int(random.integers(4000, 40000))
        rounds = count_rounds(sizes, staging)
        for end, rank in product((0, 1), range(size)):
            messages = [message_sizes(nbytes, rounds) for pair, nbytes in sizes.items() if pair[end] == rank]
            if messages:
                assert np.sum(messages, axis=0).max(initial=0) <= staging // BUFFERS
        assert all(cuts(nbytes, rounds)[-1] == nbytes for nbytes in sizes.values() if rounds)


def test_staging_that_is_too_small_is_refused() -> None:
    sizes = {(0, peer): 1000 for peer in range(1, 11)}
    with pytest.raises(EngineError, match=r"staging of 1280 bytes is too small .* 10 others: it needs more than 1280"):
        count_rounds(sizes, BUFFERS * 2 * ALIGNMENT * 10)


def test_sizes_that_are_not_those_of_the_pieces_are_refused() -> None:
    class Nowhere(Wire):
        def _exchange(self, *arguments: Any) -> Any: ...

        def _abort(self) -> None: ...

    outgoing = [Outgoing(1, 16, _segments((0, 1)), random_sources(0), DTYPES)]
    with pytest.raises(ValueError, match="to pack for 1, planned 16"):
        CollectiveTransfer(Nowhere(["a", "b"], 0, 1.0), 1, outgoing, [], torch.device("cpu"))
