"""Methods of a worker group: `@register` marks a method of a worker class, and gives it the type that its group calls.

    class Actor:
        @register(THREE_D_PROTO, exclusive=True)
        def update(self, batch: SampleBatch, *, temperature: float) -> Update: ...

    class ActorGroup(WorkerGroup):
        update = Actor.update

`actor.update(batch, temperature=1.0)` of an `Actor` runs here and returns an `Update`. The same of an `ActorGroup` runs
on every rank and returns a `Future[list[Update]]`, and a type checker knows both from the one signature:

    protocol    arguments of the group                            result of the group, R being a worker's
    ToAll       the worker's                                      list[R]
    OneEach     a sequence of the worker's one, a rank each       list[R]
    Splitting   the worker's; the first is data: a D, a future    R, joined, of a list, a tensor, a batch or columns,
                of one, or what fetches one (a `RemoteBatch`)     with None of ranks that have none; else list[R]
    any other   not checked                                       not checked
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Self, overload
from typing import Protocol as Structure

from engine3d.errors import UserError
from engine3d.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from hybridflow.batch.sample_batch import SampleBatch
    from hybridflow.batch.worker_output import Columns
    from hybridflow.workers.future import Future


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one call."""

    positional: tuple[Any, ...] = ()
    keyword: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankGrid:
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
        cuts_into: the number of shards of data. A future of as many is passed on from rank to rank; any other,
            and every one where this is None, is fetched and split again.
    """

    name: str
    distribute: Callable[[RankGrid, Arguments], list[Arguments]]
    collect: Callable[[RankGrid], list[int]]
    concatenate: bool = True
    splits: bool = True
    cuts_into: Callable[[RankGrid], int] | None = None


class ToAll(Protocol):
    """The same arguments to every rank; a list of all results."""

    __slots__ = ()


class OneEach(Protocol):
    """Sequences of one argument a rank; a list of all results."""

    __slots__ = ()


class Splitting(Protocol):
    """Data that is split over the ranks; their results, joined."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Registration:
    """Arguments of `@register` on a method."""

    protocol: Protocol
    blocking: bool
    exclusive: bool
    timeout_s: float | None = None
    routes: bool = False


class Caller(ABC):
    """Calls the registered methods of a worker class on all ranks."""

    @abstractmethod
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method by its name: a `Future`, or the result of a blocking one."""


class Method[**W, R, **G, F]:
    """A registered method: of a worker it takes W and returns R, of a worker's group it takes G and returns F.

    An attribute of a worker class, and of a group class by the same name.
    """

    def __init__(self, function: Callable[..., R], registration: Registration) -> None:
        functools.update_wrapper(self, function)
        self._function, self.registration = function, registration
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        if self._name and name != self._name:
            raise TypeError(f"{owner.__name__}.{name}: is the method {self._name}, expected it by that name")
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Caller, owner: type) -> Callable[G, F]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[W, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, Caller):
            return functools.partial(instance.call, self._name)
        return self._function.__get__(instance, owner)

    def __call__(self, worker: Any, /, *args: W.args, **kwargs: W.kwargs) -> R:
        """Run it in this process, of a worker: `Base.method(self, ...)`."""
        return self._function(worker, *args, **kwargs)


class Fetchable[D](Structure):
    """A stand-in for data elsewhere, such as a `RemoteBatch` for a `SampleBatch`."""

    def fetch(self) -> D:
        """Fetch all of it."""


type Given[D] = D | Future[D] | Fetchable[D]
"""Argument types of a caller where ranks get their shards of a D."""


class _MarkToAll(Structure):
    def __call__[S, **P, R](self, method: Callable[Concatenate[S, P], R], /) -> Method[P, R, P, Future[list[R]]]: ...


class _MarkToAllBlocking(Structure):
    def __call__[S, **P, R](self, method: Callable[Concatenate[S, P], R], /) -> Method[P, R, P, list[R]]: ...


class _MarkOneEach(Structure):
    def __call__[S, D, R](self, method: Callable[[S, D], R], /) -> Method[[D], R, [Sequence[D]], Future[list[R]]]: ...


class _MarkSplitting(Structure):
    @overload
    def __call__[S, D, **P, T](
        self, method: Callable[Concatenate[S, D, P], list[T]], /
    ) -> Method[Concatenate[D, P], list[T], Concatenate[Given[D], P], Future[list[T]]]: ...
    @overload
    def __call__[S, D, **P, J: (Tensor, SampleBatch, Columns)](  # type: ignore[overload-overlap]
        self, method: Callable[Concatenate[S, D, P], J | None], /
    ) -> Method[Concatenate[D, P], J | None, Concatenate[Given[D], P], Future[J]]: ...
    @overload
    def __call__[S, D, **P, R](
        self, method: Callable[Concatenate[S, D, P], R], /
    ) -> Method[Concatenate[D, P], R, Concatenate[Given[D], P], Future[list[R]]]: ...
    @overload
    def __call__[S, **P, R](self, method: Callable[Concatenate[S, P], R], /) -> Method[P, R, P, Future[Any]]: ...


@overload
def register(
    protocol: ToAll, *, blocking: Literal[False] = False, exclusive: bool = False, timeout_s: float | None = None
) -> _MarkToAll: ...
@overload
def register(
    protocol: ToAll, *, blocking: Literal[True], exclusive: bool = False, timeout_s: float | None = None
) -> _MarkToAllBlocking: ...
@overload
def register(
    protocol: OneEach, *, blocking: Literal[False] = False, exclusive: bool = False, timeout_s: float | None = None
) -> _MarkOneEach: ...
@overload
def register(
    protocol: Splitting,
    *,
    blocking: Literal[False] = False,
    exclusive: bool = False,
    timeout_s: float | None = None,
    routes: bool = False,
) -> _MarkSplitting: ...
@overload
def register(
    protocol: Protocol,
    *,
    blocking: bool = False,
    exclusive: bool = False,
    timeout_s: float | None = None,
    routes: bool = False,
) -> Any: ...
def register(
    protocol: Protocol,
    *,
    blocking: bool = False,
    exclusive: bool = False,
    timeout_s: float | None = None,
    routes: bool = False,
) -> Any:
    """Mark a worker's method as a method of its group.

    Args:
        protocol: one of `hybridflow.workers.protocols`, or your own.
        blocking: the group's method returns the result; otherwise a `Future` of it, without a wait.
        exclusive: the method computes on its devices: calls of groups that share one run in the order in which they
            were made. Not for a method that waits for one of another group, since that one may come later.
        timeout_s: limit of a call, in seconds, unless `Future.result` is given another; the group's if None.
        routes: its samples have the column `routes`, which is far larger than all others.
    """
    registration = Registration(protocol, blocking, exclusive, timeout_s, routes)

    def mark(method: Callable[..., Any]) -> Method[..., Any, ..., Any]:
        return Method(method, registration)

    return mark


def registrations(worker_class: type) -> dict[str, Registration]:
    """Return the registered methods of a class, inherited ones included."""
    attributes = {name: getattr(worker_class, name) for name in dir(worker_class)}
    return {name: method.registration for name, method in attributes.items() if isinstance(method, Method)}
