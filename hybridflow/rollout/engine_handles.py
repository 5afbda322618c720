"""A source's ways to the engines: their handles, turns on devices of models, restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol


class Check(Protocol):
    """Raises what an engine's rank died of."""

    def __call__(self, *, ask: bool = False) -> None: ...


@dataclass(frozen=True)
class EngineHandles:
    """Handles of the engines, for the controller.

    Args:
        actors: handle of the first rank of every engine, by number.
        nodes: Ray's id of the node of each.
        threads: Ray's name of the threads in which they take calls besides those of their group.
        hosts: of each engine, each of which has a rank.
        scorers: handle of every rank of the reward functions.
        check: raises what an engine's rank died of, where that is known; with `ask` it finds out.
        watched: watches the ranks in a block that waits for responses; what it gives is called again and again, and
            raises where they stand still.
        take_turn: waits until nobody else computes on the engines' devices, and they have their memory and weights.
    """

    actors: Sequence[Any] = ()
    nodes: Sequence[str] = ()
    threads: str = ""
    hosts: int = 1
    scorers: Sequence[Any] = ()
    check: Check = lambda *, ask=False: None
    watched: Callable[[], AbstractContextManager[Callable[[], None]]] = lambda: nullcontext(lambda: None)
    take_turn: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class DeviceLease:
    """Engines on devices of models, which take requests while a step waits for its groups.

    Args:
        engines: their numbers.
        after_s: that a step waits before, in seconds.
        take_turn: waits until the models do not compute, and the engines have their memory.
    """

    engines: tuple[int, ...]
    after_s: float
    take_turn: Callable[[], object]


class Restarts(Protocol):
    """Starts engines again; see `EngineRestarts`."""

    def begin(self, engine: int, cause: str) -> None: ...
    def started(self, *, wait: bool = False) -> Sequence[int]: ...
    def give_weights(self, engine: int, version: int) -> None: ...
