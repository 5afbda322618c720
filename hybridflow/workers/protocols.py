"""Transfer protocols: how the data of one call is split over the ranks of a role, and which results come back.

A protocol is a pair of pure functions over a layout (HybridFlow, EuroSys 2025, table 3). `@register` binds a method of
a worker to one (`hybridflow.workers.methods`); a `WorkerGroup` then runs the method on all ranks at once.

In protocols that split, **positional arguments are data and are split, keyword arguments go to every rank whole**.
Data is a tensor (rows), a list, or anything with `split(parts)`, such as a `SampleBatch`; `Shards` is data that is
split already.

    protocol          arguments                                   result
    ONE_TO_ALL        the same to every rank                      a list, one a rank
    ALL_TO_ALL        lists with one entry a rank                 a list, one a rank
    DP_PROTO          split over the ranks                        of all ranks, concatenated
    3D_PROTO          split over dp, the same within a replica    of each replica's last stage, tp 0, concatenated
    3D_ALL_MICRO_DP   split over generation replicas              of each one's first rank, concatenated
    3D_PP_ONLY        the same to every rank                      of each stage's tp 0, dp 0, concatenated
"""

from __future__ import annotations

from collections.abc import Callable

from engine3d.errors import UserError
from hybridflow.workers.methods import (
    Arguments,
    OneEach,
    Protocol,
    RankGrid,
    Splitting,
    ToAll,
    register,
    registrations,
)
from hybridflow.workers.shards import ShardedData, split

__all__ = [
    "ALL_TO_ALL",
    "DP_PROTO",
    "ONE_TO_ALL",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_ONLY",
    "THREE_D_PROTO",
    "Arguments",
    "Protocol",
    "RankGrid",
    "ShardedData",
    "register",
    "registrations",
    "split",
]


def _same_to_all(grid: RankGrid, arguments: Arguments) -> list[Arguments]:
    return [arguments] * grid.layout.world_size


def _one_each(grid: RankGrid, arguments: Arguments) -> list[Arguments]:
    world = grid.layout.world_size
    named = [(f"argument {position}", value) for position, value in enumerate(arguments.positional, start=1)]
    for name, value in [*named, *arguments.keyword.items()]:
        if not isinstance(value, list | tuple) or len(value) != world:
            size = len(value) if isinstance(value, list | tuple) else type(value).__name__
            raise UserError(f"ALL_TO_ALL: {name} has {size} entries, expected a list of {world}, one a rank")
    return [
        Arguments(
            tuple(value[rank] for value in arguments.positional),
            {name: value[rank] for name, value in arguments.keyword.items()},
        )
        for rank in range(world)
    ]


def _splitting(
    name: str,
    replica: Callable[[RankGrid, int], int],
    replicas: Callable[[RankGrid], int],
    collect: Callable[[RankGrid], list[int]],
) -> Splitting:
    """Split data over replicas and give every rank of a replica the same shard."""

    def distribute(grid: RankGrid, arguments: Arguments) -> list[Arguments]:
        shards = [split(value, replicas(grid)) for value in arguments.positional]
        return [
            Arguments(tuple(shard[replica(grid, rank)] for shard in shards), arguments.keyword)
            for rank in range(grid.layout.world_size)
        ]

    return Splitting(name, distribute, collect, cuts_into=replicas)


def _every_rank(grid: RankGrid) -> list[int]:
    return list(range(grid.layout.world_size))


def _last_stages(grid: RankGrid) -> list[int]:
    layout = grid.layout
    return [layout.rank(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]


def _stages(grid: RankGrid) -> list[int]:
    return [grid.layout.rank(pp=pp) for pp in range(grid.layout.pp)]


def _micro_replicas(grid: RankGrid) -> int:
    """Count the model's copies while generating: micro data parallelism within each of the dp * cp training copies."""
    layout = grid.layout
    return layout.dp * layout.cp * (layout.tp // grid.generation_tp) * (layout.pp // grid.generation_pp)


def _micro_replica(grid: RankGrid, rank: int) -> int:
    """Return the generation copy that a rank belongs to.

    Neighbouring tp ranks belong to different copies, and so do neighbouring stages (the paper's section 5.3): the
    weights that a rank holds for training are then always part of those that it needs for generating.
    """
    layout, coordinates = grid.layout, grid.layout.coordinates(rank)
    tp_copies, pp_copies = layout.tp // grid.generation_tp, layout.pp // grid.generation_pp
    training_copy = coordinates.dp * layout.cp + coordinates.cp
    return (training_copy * pp_copies + coordinates.pp % pp_copies) * tp_copies + coordinates.tp % tp_copies


def _micro_leaders(grid: RankGrid) -> list[int]:
    leaders: dict[int, int] = {}
    for rank in range(grid.layout.world_size):
        leaders.setdefault(_micro_replica(grid, rank), rank)
    return [leaders[replica] for replica in range(_micro_replicas(grid))]


ONE_TO_ALL = ToAll("ONE_TO_ALL", _same_to_all, _every_rank, concatenate=False, splits=False)
ALL_TO_ALL = OneEach("ALL_TO_ALL", _one_each, _every_rank, concatenate=False, splits=False)
DP_PROTO = _splitting("DP_PROTO", lambda grid, rank: rank, lambda grid: grid.layout.world_size, _every_rank)
THREE_D_PROTO = _splitting(
    "3D_PROTO", lambda grid, rank: grid.layout.coordinates(rank).dp, lambda grid: grid.layout.dp, _last_stages
)
THREE_D_ALL_MICRO_DP = _splitting("3D_ALL_MICRO_DP", _micro_replica, _micro_replicas, _micro_leaders)
THREE_D_PP_ONLY = Protocol("3D_PP_ONLY", _same_to_all, _stages, splits=False)
