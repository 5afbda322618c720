"""Orders of each rank for a transfer: its own share, and no more of the others than it needs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import pytest

from engine3d.errors import EngineError, UserError
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.plan.coordinate import CollectiveOrder, Orders, ReceiveOrder, SendOrder, coordinate
from engine3d.reshard.plan.rounds import count_rounds
from engine3d.reshard.plan.transfers import Link
from tests.support.work import calls_of

ROWS, COLUMNS = 512, 64
STAGES, CUT = 16, 64
"""1,024 ranks of a trainer: every tensor lies in one stage, in 64 cuts of its rows."""
ENGINES, TP = 16, 32
LAYERS = 64
GPUS_PER_NODE = 8


def _shards(name: str, number: int, slot: int, tensors: list[str], shard: int, count: int, owner: str) -> SharedShards:
    """A rank that holds the same rows of some tensors, one buffer a tensor."""
    rows = ROWS // count
    buffers = tuple(Buffer(tensor, "bfloat16", (rows, COLUMNS)) for tensor in tensors)
    box = ((shard * rows, (shard + 1) * rows), (0, COLUMNS))
    holdings = tuple(Holding(tensor, box, index, 0, (COLUMNS, 1)) for index, tensor in enumerate(tensors))
    node, gpu = divmod(slot, GPUS_PER_NODE)
    shards = RankShards(name, number, Location(f"node {node}", f"gpu {gpu}"), buffers, holdings, owner=owner)
    return SharedShards(shards, (None,) * len(buffers))


@cache
def _world() -> tuple[list[SharedShards], list[SharedShards], dict[str, tuple[int, ...]]]:
    """1,024 ranks of a trainer and, on other nodes, 16 engines of 32."""
    tensors = [f"model.layers.{layer}.weight" for layer in range(LAYERS)]
    sources = [
        _shards(f"actor rank {rank}", rank, rank, tensors[rank // CUT :: STAGES], rank % CUT, CUT, "the trainer")
        for rank in range(STAGES * CUT)
    ]
    targets = [
        _shards(
            f"engine {rank // TP} rank {rank % TP}",
            rank,
            len(sources) + rank,
            tensors,
            rank % TP,
            TP,
            f"engine {rank // TP}",
        )
        for rank in range(ENGINES * TP)
    ]
    return sources, targets, dict.fromkeys(tensors, (ROWS, COLUMNS))


def _collective_orders(orders: Orders) -> list[CollectiveOrder]:
    every: list[SendOrder | ReceiveOrder] = [*orders.send, *orders.receive]
    return [order.collective for order in every if order.collective is not None]


@pytest.mark.slow
def test_1024_ranks_of_a_trainer_and_512_of_engines_are_coordinated_soon() -> None:
    sources, targets, tensors = _world()
    made: list[Orders] = []
    calls = calls_of(
        lambda: made.append(
            coordinate(sources, targets, tensors, store=lambda: "tcp://127.0.0.1:1", staging_bytes=1 << 16)
        )
    )
    [orders] = made
    orders_of_ranks = _collective_orders(orders)
    assert len(orders_of_ranks) == len(sources) + len(targets)
    assert len(orders.plan.transfers) == ENGINES * TP * STAGES * CUT // TP
    transfers = len(orders.plan.transfers)
    assert calls < 200 * transfers
    # All that goes to the ranks: their segments, and what grows with the participants by a name each.
    names = len(pickle.dumps(orders_of_ranks[0].names))
    some: list[SendOrder | ReceiveOrder] = [*orders.send[::100], *orders.receive[::100]]
    for order in some:
        assert order.collective is not None
        segments = sum(
            column.nbytes
            for message in (*order.collective.outgoing, *order.collective.incoming)
            for transfer in message.transfers
            for column in (getattr(transfer.segments, name) for name in transfer.segments.__slots__)
        )
        assert len(pickle.dumps(order)) < names + 3 * segments + 50_000


@pytest.mark.slow
def test_every_message_is_at_both_of_its_ends_and_all_take_the_same_rounds() -> None:
    sources, targets, tensors = _world()
    orders = coordinate(sources, targets[:TP], tensors, store=lambda: "tcp://127.0.0.1:1", staging_bytes=1 << 14)
    orders_of_ranks = _collective_orders(orders)
    sent = {(message.sender, message.receiver): message for order in orders_of_ranks for message in order.outgoing}
    received = {(message.sender, message.receiver): message for order in orders_of_ranks for message in order.incoming}
    assert sent == received and sent
    for index, order in enumerate(sorted(orders_of_ranks, key=lambda order: order.index)):
        assert order.index == index
        assert {message.sender for message in order.outgoing} <= {index}
        assert {message.receiver for message in order.incoming} <= {index}
    rounds = count_rounds({pair: message.nbytes for pair, message in sent.items()}, 1 << 14)
    assert rounds > 1 and {order.rounds for order in orders_of_ranks} == {rounds}


@pytest.mark.slow
def test_staging_that_is_too_small_is_refused_before_any_rank_is_told() -> None:
    sources, targets, tensors = _world()
    with pytest.raises(EngineError, match=r"staging of 1000 bytes is too small for a rank .* with 32 others"):
        coordinate(sources, targets[:TP], tensors, store=lambda: "tcp://127.0.0.1:1", staging_bytes=1000)


def _colocated(first_device: int) -> tuple[list[SharedShards], list[SharedShards], dict[str, tuple[int, ...]]]:
    """Two stages of two ranks, and an engine of two that pulls; its devices begin with a number of the trainer's."""
    tensors = [f"model.layers.{layer}.weight" for layer in range(4)]
    sources = [
        _shards(f"actor rank {rank}", rank, rank, tensors[rank // 2 :: 2], rank % 2, 2, "actor") for rank in range(4)
    ]
    targets = [
        _shards(f"engine 0 rank {rank}", rank, first_device + rank, tensors, rank, 2, "engine 0") for rank in range(2)
    ]
    pulling = [replace(target, handles=(None,) * len(target.handles), pulls=True) for target in targets]
    return sources, pulling, dict.fromkeys(tensors, (ROWS, COLUMNS))


def test_an_engine_that_releases_its_weights_reads_them_from_its_node() -> None:
    sources, targets, tensors = _colocated(2)
    orders = coordinate(sources, targets, tensors)
    assert orders.engines_receive and all(not order.one_sided and not order.targets for order in orders.send)
    pulled = [transfer for order in orders.receive for transfer in order.one_sided]
    assert sorted(pulled, key=lambda transfer: (transfer.source, transfer.target)) == list(orders.plan.transfers)
    for target, order in enumerate(orders.receive):
        assert {transfer.target for transfer in order.one_sided} == {target}
        assert order.sources == {transfer.source: sources[transfer.source] for transfer in order.one_sided}
        assert order.collective is None
        assert [transfer.link for transfer in order.one_sided][-1] is Link.DEVICE  # the others are in flight before
    assert orders.plan.bytes_moved == orders.plan.bytes_needed


def test_an_engine_that_releases_its_weights_takes_messages_only_where_no_trainer_is() -> None:
    sources, targets, tensors = _colocated(GPUS_PER_NODE)
    orders = coordinate(sources, targets, tensors, store=lambda: "tcp://127.0.0.1:1")
    assert all(order.collective is not None and not order.one_sided for order in orders.receive)
    sources, targets, tensors = _colocated(2)
    with pytest.raises(UserError, match=r"^engine 0 rank 0 releases .* with actor rank 2, .* from actor rank 0 over"):
        coordinate(sources, targets, tensors, transport="collective", store=lambda: "tcp://127.0.0.1:1")
