"""Transfer protocols: how the data of one call is split over the ranks of a role, and which results come back.

A protocol is a pair of pure functions over a layout (HybridFlow, EuroSys 2025, table 3). `@register` binds a method of
a worker to one; a `WorkerGroup` then runs the method on all ranks at once.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.batch.load_balance import even_ranges


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call."""

    positional: tuple[Any, ...] = ()
    keyword: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shards:
    """Data split already: one part for each piece that a protocol would make."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a role: its layout, and the tensor and pipeline sizes that it generates with, where it does both."""

    layout: Layout
    generation_tp: int = 1
    generation_pp: int = 1

    def __post_init__(self) -> None:
        for name, training, generation in (
            ("tp", self.layout.tp, self.generation_tp),
            ("pp", self.layout.pp, self.generation_pp),
        ):
            if generation < 1 or training % generation:
                raise UserError(
                    f"layout: generation {name}={generation} does not divide the training {name}={training}"
                )


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to spread a call over ranks.

    Args:
        name: how errors call it.
        distribute: the arguments of each rank, from those of the call.
        collect: the ranks whose results make up that of the call, in order.
        concatenate: join their results into one (tensors, lists, batches); otherwise the result is their list.
        splits: positional arguments are data that `distribute` splits.
    """

    name: str
    distribute: Callable[[Grid, Arguments], list[Arguments]]
    collect: Callable[[Grid], list[int]]
    concatenate: bool = True
    splits: bool = True


@dataclass(frozen=True, slots=True)
class Registration:
    """What `@register` noted on a method."""

    protocol: Protocol
    blocking: bool
    exclusive: bool
    timeout_s: float | None = None


def register[F: Callable[..., Any]](
    protocol: Protocol, *, blocking: bool = False, exclusive: bool = False, timeout_s: float | None = None
) -> Callable[[F], F]:
    """Mark a worker's method as a method of its group.

    Args:
        protocol: one of this module's, or your own.
        blocking: the group's method returns the result; otherwise a `Future` of it, and the caller goes on.
        exclusive: the method computes on its devices: calls of groups that share one run in the order in which they
            were made. Not for a method that waits for one of another group, since that one may come later.
        timeout_s: limit of a call, in seconds, unless `Future.result` is given another; the group's if None.
    """

    def mark(method: F) -> F:
        registration = Registration(protocol, blocking, exclusive, timeout_s)
        method.__hybridflow_registration__ = registration  # type: ignore[attr-defined]
        return method

    return mark


def registrations(worker_class: type) -> dict[str, Registration]:
    """The registered methods of a class, inherited ones included."""
    found = {}
    for name in dir(worker_class):
        registration = getattr(getattr(worker_class, name), "__hybridflow_registration__", None)
        if registration is not None:
            found[name] = registration
    return found


def split(data: Any, parts: int) -> list[Any]:
    """Cut data into consecutive parts whose sizes differ by one at most.

    Raises:
        UserError: fewer rows than parts, shards of another number, or something that cannot be split.
    """
    import torch  # here: every rank imports this module, and not every rank needs torch

    if isinstance(data, Shards):
        if len(data.parts) != parts:
            raise UserError(f"data comes in {len(data.parts)} shards, expected {parts}")
        return list(data.parts)
    if isinstance(data, torch.Tensor | list):
        if len(data) < parts:
            raise UserError(f"cannot split {len(data)} rows of data into {parts} parts")
        if isinstance(data, torch.Tensor):
            return list(torch.tensor_split(data, parts))
        return [data[part.start : part.stop] for part in even_ranges(len(data), parts)]
    if hasattr(data, "split") and not isinstance(data, str | bytes):
        try:
            return list(data.split(parts))
        except ValueError as error:
            raise UserError(str(error)) from None
    raise UserError(
        f"cannot split a {type(data).__name__} over ranks: pass a tensor, a list or a batch, or pass it by keyword "
        "to give it to every rank whole"
    )


def concatenate(results: Sequence[Any]) -> Any:
    """Join the results of ranks: rows of tensors, lists and batches; None of Nones; anything else stays a list."""
    import torch

    first = results[0]
    if all(result is None for result in results):
        return None
    if all(isinstance(result, torch.Tensor) and result.dim() for result in results):
        return torch.cat(list(results))
    if all(isinstance(result, list) for result in results):
        return [item for result in results for item in result]
    if hasattr(first, "concatenate") and all(type(result) is type(first) for result in results):
        return first.concatenate(list(results))
    return list(results)


def _same_to_all(grid: Grid, arguments: Arguments) -> list[Arguments]:
    return [arguments] * grid.layout.world_size


def _one_each(grid: Grid, arguments: Arguments) -> list[Arguments]:
    world = grid.layout.world_size
    named = [(f"argument {place}", value) for place, value in enumerate(arguments.positional, start=1)]
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


def _split_by(replica: Callable[[Grid, int], int], replicas: Callable[[Grid], int]) -> Callable[..., list[Arguments]]:
    """Distribution that splits data over replicas and gives every rank of a replica the same part."""

    def distribute(grid: Grid, arguments: Arguments) -> list[Arguments]:
        parts = [split(value, replicas(grid)) for value in arguments.positional]
        return [
            Arguments(tuple(part[replica(grid, rank)] for part in parts), arguments.keyword)
            for rank in range(grid.layout.world_size)
        ]

    return distribute


def _every_rank(grid: Grid) -> list[int]:
    return list(range(grid.layout.world_size))


def _last_stages(grid: Grid) -> list[int]:
    layout = grid.layout
    return [layout.rank(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]


def _stages(grid: Grid) -> list[int]:
    return [grid.layout.rank(pp=pp) for pp in range(grid.layout.pp)]


def _micro_replicas(grid: Grid) -> int:
    """Copies of the model while generating: micro data parallelism within each of the dp * cp training copies."""
    layout = grid.layout
    return layout.dp * layout.cp * (layout.tp // grid.generation_tp) * (layout.pp // grid.generation_pp)


def _micro_replica(grid: Grid, rank: int) -> int:
    """Which generation copy a rank belongs to.

    Neighbouring tp ranks belong to different copies, and so do neighbouring stages (the paper's section 5.3): the
    weights that a rank holds for training are then always part of those that it needs for generating.
    """
    layout, place = grid.layout, grid.layout.coordinates(rank)
    tp_copies, pp_copies = layout.tp // grid.generation_tp, layout.pp // grid.generation_pp
    training_copy = place.dp * layout.cp + place.cp
    return (training_copy * pp_copies + place.pp % pp_copies) * tp_copies + place.tp % tp_copies


def _micro_leaders(grid: Grid) -> list[int]:
    leaders: dict[int, int] = {}
    for rank in range(grid.layout.world_size):
        leaders.setdefault(_micro_replica(grid, rank), rank)
    return [leaders[replica] for replica in range(_micro_replicas(grid))]


ONE_TO_ALL = Protocol("ONE_TO_ALL", _same_to_all, _every_rank, concatenate=False, splits=False)
ALL_TO_ALL = Protocol("ALL_TO_ALL", _one_each, _every_rank, concatenate=False, splits=False)
DP_PROTO = Protocol("DP_PROTO", _split_by(lambda grid, rank: rank, lambda grid: grid.layout.world_size), _every_rank)
THREE_D_PROTO = Protocol(
    "3D_PROTO",
    _split_by(lambda grid, rank: grid.layout.coordinates(rank).dp, lambda grid: grid.layout.dp),
    _last_stages,
)
THREE_D_ALL_MICRO_DP = Protocol("3D_ALL_MICRO_DP", _split_by(_micro_replica, _micro_replicas), _micro_leaders)
THREE_D_PP_ONLY = Protocol("3D_PP_ONLY", _same_to_all, _stages, splits=False)
