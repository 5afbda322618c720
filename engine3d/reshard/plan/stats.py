"""Cost of a plan in bytes, compared with gathering everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import RankShards
from engine3d.reshard.plan.rounds import STAGING_BYTES
from engine3d.reshard.plan.transfers import Link, Plan

BUCKET_BYTES = 512 * 10**6
"""Bucket size of the strategy that gathers everything, the default of its implementations."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The least that it costs to gather every tensor on every trainer rank and to hand all to every engine rank.

    With M bytes of all tensors, S trainer ranks and T engine ranks:

    Args:
        bytes_moved: S * M less what each trainer rank holds itself, plus T * M.
        max_rank_bytes: M: every engine rank receives all.
        max_node_ingress_bytes: for a node of the trainer M less what its ranks hold together, as if everything crossed
            to a node once and was passed on inside; for a node that has only engine ranks M, once again.
        staging_bytes: the largest tensor while it is gathered, plus a bucket of 512 MB (of the largest tensor if that
            is more, and of M if that is less).
    """

    bytes_moved: int
    max_rank_bytes: int
    max_node_ingress_bytes: int
    staging_bytes: int


def plan_stats(
    plan: Plan,
    sources: Sequence[RankShards],
    targets: Sequence[RankShards],
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, int | float]:
    """Compute the statistics of a plan as one flat dict of numbers.

    - bytes_needed, bytes_moved, bytes_aliased: as `Plan` has them; bytes_held: needed and aliased, that is all that
      the engines hold.
    - bytes_same_memory: aliased; bytes_same_device, bytes_same_node, bytes_between_nodes: moved over each link.
    - moved_of_needed, moved_of_held: ratios.
    - max_rank_bytes: the most that a rank sends or receives, over all links.
    - max_rank_network_bytes: the most that a rank sends to other nodes or receives from them.
    - max_node_ingress_bytes, max_node_egress_bytes: the most that enters or leaves a node from or to others.
    - transfers, pieces: transfers and segments of the plan; max_rank_pieces: the most segments that a rank receives.
    - staging_bytes: the most that a rank packs for other nodes or receives from them, bounded by 256 MB.
    - baseline_*: see `Baseline`.

    Args:
        plan: of these sources and targets.
        sources: the trainer's ranks.
        targets: the engines' ranks.
        tensors: shape and dtype of every tensor of the model, by name.
    """
    by_link: dict[Link, int] = dict.fromkeys(Link, 0)
    by_link[Link.MEMORY] = plan.bytes_aliased
    ranks: dict[tuple[str, int], int] = defaultdict(int)
    network: dict[tuple[str, int], int] = defaultdict(int)
    nodes: dict[tuple[str, str], int] = defaultdict(int)
    segments: dict[int, int] = defaultdict(int)
    for transfer in plan.transfers:
        by_link[transfer.link] += transfer.nbytes
        segments[transfer.target] += len(transfer.segments)
        for side, number, rank in (
            ("out", transfer.source, sources[transfer.source]),
            ("in", transfer.target, targets[transfer.target]),
        ):
            ranks[side, number] += transfer.nbytes
            if transfer.link is Link.NETWORK:
                network[side, number] += transfer.nbytes
                nodes[side, rank.location.node] += transfer.nbytes
    moved, resident = plan.bytes_moved, plan.bytes_needed + plan.bytes_aliased
    return {
        "bytes_held": resident,
        "bytes_needed": plan.bytes_needed,
        "bytes_moved": moved,
        "bytes_aliased": plan.bytes_aliased,
        **{f"bytes_{link.value}": nbytes for link, nbytes in by_link.items()},
        "moved_of_needed": moved / plan.bytes_needed if plan.bytes_needed else 1.0,
        "moved_of_held": moved / resident if resident else 1.0,
        "max_rank_bytes": max(ranks.values(), default=0),
        "max_rank_network_bytes": max(network.values(), default=0),
        "max_node_ingress_bytes": _most(nodes, "in"),
        "max_node_egress_bytes": _most(nodes, "out"),
        "transfers": len(plan.transfers),
        "pieces": sum(segments.values()),
        "max_rank_pieces": max(segments.values(), default=0),
        "staging_bytes": min(STAGING_BYTES, max(network.values(), default=0)),
        **{f"baseline_{name}": value for name, value in asdict(baseline_of(sources, targets, tensors)).items()},
    }


def baseline_of(
    sources: Sequence[RankShards],
    targets: Sequence[RankShards],
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> Baseline:
    """Count what gathering everything would cost the same ranks."""
    sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    model, largest = sum(sizes.values()), max(sizes.values())
    itemsize = {name: dtype.itemsize for name, (_, dtype) in tensors.items()}
    on_node: dict[str, set[tuple[str, Box]]] = defaultdict(set)
    gathered = 0
    for source in sources:
        boxes = {(holding.tensor, holding.box) for holding in source.holdings}
        gathered += model - _bytes(boxes, itemsize)
        on_node[source.location.node] |= boxes
    ingress = [model - _bytes(boxes, itemsize) for boxes in on_node.values()]
    if any(target.location.node not in on_node for target in targets):
        ingress.append(model)
    return Baseline(
        bytes_moved=gathered + len(targets) * model,
        max_rank_bytes=model,
        max_node_ingress_bytes=max(ingress),
        staging_bytes=largest + min(model, max(BUCKET_BYTES, largest)),
    )


def _most(nodes: dict[tuple[str, str], int], side: str) -> int:
    return max((nbytes for (which, _), nbytes in nodes.items() if which == side), default=0)


def _bytes(boxes: Iterable[tuple[str, Box]], itemsize: dict[str, int]) -> int:
    """Bytes of boxes that share no elements."""
    return sum(prod(stop - start for start, stop in box) * itemsize[name] for name, box in boxes if name in itemsize)
