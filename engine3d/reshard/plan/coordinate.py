"""Orders of each rank for a transfer, worked out once by a process that sees all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine3d.errors import EngineError, UserError
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.same_model import check_same_model
from engine3d.reshard.describe.shards import RankShards
from engine3d.reshard.plan.planner import make_plan
from engine3d.reshard.plan.rounds import STAGING_BYTES, count_rounds
from engine3d.reshard.plan.transfers import Link, Plan, Transfer

TransportChoice = Literal["auto", "collective"]


@dataclass(frozen=True, slots=True)
class Message:
    """All that one participant of the collective transport sends to another.

    Args:
        sender, receiver: their indices among the participants.
        transfers: sorted by target; all have the same source.
        dtypes: for each transfer those of its target's buffers.
    """

    sender: int
    receiver: int
    transfers: tuple[Transfer, ...]
    dtypes: tuple[tuple[str, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers, by the targets' dtypes."""
        return sum(transfer.nbytes for transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class CollectiveOrder:
    """Work of one participant in the collective transport.

    Args:
        index: of this participant.
        names: of all participants, for errors.
        store: address of the store at which they meet.
        group: a name that no other group of that store has.
        rounds: that the transfer takes, the same for every participant.
        outgoing, incoming: of this participant.
        timeout_s: limit of every wait for another participant.
    """

    index: int
    names: tuple[str, ...]
    store: str
    group: str
    rounds: int
    outgoing: tuple[Message, ...]
    incoming: tuple[Message, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Work of a trainer's rank in every transfer.

    Args:
        one_sided: transfers that it writes into memory that it maps.
        targets: the memory of the engine ranks that it writes into, for its own transfers or on behalf of ranks of
            other nodes, by index among the targets.
        collective: its order in the collective transport, if it has one.
    """

    one_sided: tuple[Transfer, ...]
    targets: Mapping[int, SharedShards]
    collective: CollectiveOrder | None


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Work of an engine's rank in every transfer.

    Args:
        collective: its order in the collective transport, if it has one.
        one_sided: transfers that it reads from memory that it maps, if nobody writes them.
        sources: the memory of the trainer's ranks that it reads from, by index among the sources.
    """

    collective: CollectiveOrder | None = None
    one_sided: tuple[Transfer, ...] = ()
    sources: Mapping[int, SharedShards] = field(default_factory=dict)

    @property
    def takes_part(self) -> bool:
        """True if anything is left to do for the rank."""
        return self.collective is not None or bool(self.one_sided)


@dataclass(frozen=True, slots=True)
class Orders:
    """Plan of all transfers between some ranks, and each rank's orders.

    Args:
        plan: which bytes go where.
        send: one for each source.
        receive: one for each target.
    """

    plan: Plan
    send: tuple[SendOrder, ...]
    receive: tuple[ReceiveOrder, ...]

    @property
    def engines_receive(self) -> bool:
        """True if ranks of engines take part in transfers themselves."""
        return any(order.takes_part for order in self.receive)


def coordinate(
    sources: Sequence[SharedShards],
    targets: Sequence[SharedShards],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    transport: TransportChoice = "auto",
    store: Callable[[], str] | None = None,
    group: str = "weights",
    staging_bytes: int = STAGING_BYTES,
    timeout_s: float = 600.0,
) -> Orders:
    """Plan the transfers from a trainer to engines, and choose a transport for each pair of ranks.

    A source writes into the memory of targets on its own node. What goes between nodes goes over a process group of the
    ranks concerned. There a trainer's rank on the target's own device receives it and writes it into the target's
    memory, since two processes cannot share a GPU in one NCCL group; where there is none the target does it itself.
    A target that pulls reads from the memory of sources on its node, and can have no trainer's rank write for it.

    Args:
        sources: the trainer's ranks.
        targets: the ranks of all engines.
        tensors: shape of every tensor of the HuggingFace model.
        transport: "collective" takes the process group within a node too, for all but a rank's own device.
        store: makes a store that all ranks reach, for the collective transport; its address. Not called without need.
        group: a name that no other group of the store has.
        staging_bytes: most memory of a rank for what goes over the process group.
        timeout_s: limit of every wait for another rank.

    Raises:
        UserError: a tensor that only the trainer or only an engine has, or that has different shapes; or a target that
            pulls, has a trainer's rank on its device and needs what comes over the process group.
        EngineError: no store where one is needed, or a staging that is too small for a rank's number of peers.
    """
    engines: dict[str, list[RankShards]] = {}
    for target in targets:
        engines.setdefault(target.shards.owner, []).append(target.shards)
    for name, ranks in engines.items():
        check_same_model(ranks, tensors, name)
    plan = make_plan([source.shards for source in sources], [target.shards for target in targets], tensors)
    relays = _relays(sources, targets)
    one_sided: list[list[Transfer]] = [[] for _ in sources]
    pulled: list[list[Transfer]] = [[] for _ in targets]
    between: list[Transfer] = []
    for transfer in plan.transfers:
        far = transport == "collective" or transfer.link is Link.NETWORK
        target = targets[transfer.target]
        if far and relays.get(transfer.target) != transfer.source:
            if target.pulls and transfer.target in relays:
                raise _not_pulled(sources[transfer.source], target, sources[relays[transfer.target]])
            between.append(transfer)
        elif target.pulls:
            pulled[transfer.target].append(transfer)
        else:
            one_sided[transfer.source].append(transfer)
    for source, transfers in enumerate(one_sided):
        # Every source begins with another target, its own device's last: many that write to one device at the same
        # time would halve the rate.
        first = source * len(targets) // len(sources) + 1
        transfers.sort(key=lambda transfer: (transfer.target - first) % len(targets))
    if between and store is None:
        raise EngineError("weights have to go between nodes, and no store was given at which the ranks can meet")
    orders: dict[tuple[str, int], CollectiveOrder] = {}
    if between:
        assert store is not None
        collective = _collective(sources, targets, relays, between)
        orders = _collective_orders(collective, store(), group, staging_bytes, timeout_s)
    send = []
    for index, transfers in enumerate(one_sided):
        order = orders.get(("source", index))
        written = {transfer.target for transfer in transfers}
        for message in order.incoming if order is not None else ():
            written |= {transfer.target for transfer in message.transfers}
        send.append(SendOrder(tuple(transfers), {target: targets[target] for target in sorted(written)}, order))
    receive = []
    for index, transfers in enumerate(pulled):
        first = index * len(sources) // len(targets) + 1
        transfers.sort(key=lambda transfer: (transfer.link is Link.DEVICE, (transfer.source - first) % len(sources)))
        read = sorted({transfer.source for transfer in transfers})
        order = orders.get(("target", index))
        receive.append(ReceiveOrder(order, tuple(transfers), {source: sources[source] for source in read}))
    return Orders(plan, tuple(send), tuple(receive))


def _not_pulled(source: SharedShards, target: SharedShards, relay: SharedShards) -> UserError:
    return UserError(
        f"{target.shards.name} releases its weights and shares a device with {relay.shards.name}, which cannot write "
        f"into it what comes from {source.shards.name} over a process group; expected release_weights=false, or every "
        f"weight on a trainer's rank of its own node and transport=auto"
    )


def _relays(sources: Sequence[SharedShards], targets: Sequence[SharedShards]) -> dict[int, int]:
    """Map each target on a trainer's device to the trainer's rank there."""
    by_location = {source.shards.location: index for index, source in enumerate(sources)}
    return {
        index: by_location[target.shards.location]
        for index, target in enumerate(targets)
        if target.shards.location in by_location
    }


def _collective_orders(
    collective: _Collective, store: str, group: str, staging_bytes: int, timeout_s: float
) -> dict[tuple[str, int], CollectiveOrder]:
    """List every participant's own messages, and the rounds that all of them make.

    Rounds are counted here, where all messages are seen: a rank that counted them would need the size of every message
    between any two others.
    """
    rounds = count_rounds(
        {(message.sender, message.receiver): message.nbytes for message in collective.messages}, staging_bytes
    )
    outgoing: defaultdict[int, list[Message]] = defaultdict(list)
    incoming: defaultdict[int, list[Message]] = defaultdict(list)
    for message in collective.messages:
        outgoing[message.sender].append(message)
        incoming[message.receiver].append(message)
    return {
        participant: CollectiveOrder(
            index=index,
            names=collective.names,
            store=store,
            group=group,
            rounds=rounds,
            outgoing=tuple(outgoing[index]),
            incoming=tuple(incoming[index]),
            timeout_s=timeout_s,
        )
        for index, participant in enumerate(collective.participants)
    }


@dataclass(frozen=True, slots=True)
class _Collective:
    participants: list[tuple[str, int]]
    names: tuple[str, ...]
    messages: list[Message]


def _collective(
    sources: Sequence[SharedShards],
    targets: Sequence[SharedShards],
    relays: Mapping[int, int],
    transfers: Sequence[Transfer],
) -> _Collective:
    """Collect the participants of the collective transport and their messages."""

    def receiver(target: int) -> tuple[str, int]:
        return ("source", relays[target]) if target in relays else ("target", target)

    by_pair: dict[tuple[tuple[str, int], tuple[str, int]], list[Transfer]] = {}
    for transfer in sorted(transfers, key=lambda transfer: (transfer.source, transfer.target)):
        by_pair.setdefault((("source", transfer.source), receiver(transfer.target)), []).append(transfer)
    participants = sorted({end for pair in by_pair for end in pair})
    index = {participant: number for number, participant in enumerate(participants)}
    ranks = {"source": sources, "target": targets}
    dtypes = {
        target: tuple(buffer.dtype for buffer in targets[target].shards.buffers)
        for target in {transfer.target for transfer in transfers}
    }
    return _Collective(
        participants,
        tuple(ranks[side][number].shards.name for side, number in participants),
        [
            Message(
                index[sender],
                index[taker],
                tuple(pair_transfers),
                tuple(dtypes[transfer.target] for transfer in pair_transfers),
            )
            for (sender, taker), pair_transfers in by_pair.items()
        ],
    )
