"""Turns: groups that share devices compute on them one after another, in the order in which they were called.

Only methods that are registered as exclusive take turns. A rank waits for calls that were made before its own, so that
no two wait for one another; what is registered otherwise neither waits nor is waited for, as calls of two groups that
only end together must not. When the turn goes to another group, the one that had it gives device memory back: its
`give_back` is called, where its worker has one; and its `take_back` before its next turn.

`Turns.send` is the one place from which calls go to ranks. Under a lock it first decides what has to be sent before the
call (`memory_calls`), then sends all of it in that order. What holds the order, so that no call waits for ever:

- All ranks of a group get its calls in one order, whichever threads make them, since no other call comes between the
  first and the last rank of one.
- A call waits only for calls that were sent before it, so that no circle of calls wait for one another.
- Whoever holds the lock waits for nobody: Ray takes a call and returns at once. Nothing under it sends through
  `send`, waits for a rank or ends a group, so that no thread asks for the lock twice.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import ray

from hybridflow.workers.call import Call
from hybridflow.workers.methods import Arguments
from hybridflow.workers.ranks import Ranks

GIVE_BACK = "give_back"
"""The method that is called of a group when its turn is over."""
TAKE_BACK = "take_back"
"""The method that is called of a group that gave memory back, when it has its turn again."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A call that is to be sent.

    Args:
        ranks, method: what is called.
        limit_s: for an answer, in seconds.
        arguments: of each rank that is called, each stored already where it is large.
        wanted: the ranks whose results are wanted.
        exclusive: whether it takes turns with groups that share its devices.
        inputs: the calls that make what it needs.
        members: the ranks that are called, in the order of their numbers; all of the group if None.
    """

    ranks: Ranks
    method: str
    limit_s: float
    arguments: Sequence[Arguments]
    wanted: Collection[int] = ()
    exclusive: bool = False
    inputs: Sequence[Call] = ()
    members: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """A call by which a group releases device memory or has it again."""

    ranks: Ranks
    method: str


def memory_calls(ranks: Ranks, memory: Iterable[tuple[Ranks, Literal["held", "given back"]]]) -> list[MemoryCall]:
    """What has to be sent before a group has its turn, in order: others release memory, then it has its own again.

    Args:
        ranks: of the group.
        memory: of the groups that have computed, the group itself among them.
    """
    memory = [(each, state) for each, state in memory if each.is_alive and each.failure is None]
    releasing = [
        MemoryCall(other, GIVE_BACK)
        for other, state in memory
        if other is not ranks and state == "held" and _share(ranks, other) and GIVE_BACK in other.memory_methods
    ]
    gave_back = any(each is ranks and state == "given back" for each, state in memory)
    return releasing + ([MemoryCall(ranks, TAKE_BACK)] if gave_back and TAKE_BACK in ranks.memory_methods else [])


class Turns:
    """Who computes on which devices. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._memory: weakref.WeakKeyDictionary[Ranks, Literal["held", "given back"]] = weakref.WeakKeyDictionary()

    def send(self, request: RankRequest) -> tuple[Call, list[ray.ObjectRef]]:
        """Send a call to every rank, and before it what its turn needs; the call, and where the results will lie.

        Raises:
            RankError, RankUserError: the group has died of that.
            EngineError: it has been shut down.
        """
        with self._lock:
            if request.exclusive and request.method not in (GIVE_BACK, TAKE_BACK):
                for each in memory_calls(request.ranks, self._memory.items()):
                    call, _ = self._sent(_request(each))
                    if each.ranks is request.ranks:
                        request = replace(request, inputs=(*request.inputs, call))
            return self._sent(request)

    def leave(self, ranks: Ranks) -> None:
        """The ranks of a group are gone: its turns are over."""
        with self._lock:
            self._memory.pop(ranks, None)
            self._calls = [call for call in self._calls if call.ranks is not ranks]

    def gave_back(self, ranks: Ranks) -> bool:
        """Whether a group has given memory back, and not computed since."""
        with self._lock:
            return self._memory.get(ranks) == "given back"

    def _sent(self, request: RankRequest) -> tuple[Call, list[ray.ObjectRef]]:
        """Send this call alone. The lock is held."""
        if not request.exclusive:
            return _send(request)
        call, results = _send(request, self._earlier(request.ranks))
        self._calls.append(call)
        self._memory[call.ranks] = "given back" if call.method == GIVE_BACK else "held"
        return call, results

    def _earlier(self, ranks: Ranks) -> list[Call]:
        """The calls after whose end a group's next call has its turn, in the order in which they were sent.

        Calls that those wait for in turn are among them, so that what fails can be told whoever waits.
        """
        self._calls = [call for call in self._calls if not call.is_over()]
        before = [call for call in self._calls if call.ranks is not ranks and _share(ranks, call.ranks)]
        needed = {id(each) for call in before for each in (call, *call.earlier)}
        return [call for call in self._calls if id(call) in needed]


def _send(request: RankRequest, earlier: Sequence[Call] = ()) -> tuple[Call, list[ray.ObjectRef]]:
    """Send a call to the ranks: the call, and where each rank's result will lie. Waits for nobody.

    Args:
        request: the call.
        earlier: after whose end it has its turn.

    Raises:
        RankError, RankUserError: the group has died of that.
        EngineError: it has been shut down.
    """
    ranks, method = request.ranks, request.method
    actors = tuple(ranks.actors)
    if not actors:
        ranks.check(method)
    members = range(len(actors)) if request.members is None else request.members
    # Within an object of its own: Ray would wait for arguments, and fail the call with one that failed.
    statuses = ray.put([status for call in earlier for status in call.statuses]) if earlier else ()
    answers: list[tuple[ray.ObjectRef, ray.ObjectRef]] = [
        actors[rank]
        .call.options(num_returns=2)
        .remote(method, rank in request.wanted, statuses, *arguments.positional, **arguments.keyword)
        for rank, arguments in zip(members, request.arguments, strict=True)
    ]
    own, results = ([each[place] for each in answers] for place in (0, 1))
    return Call(ranks, method, request.limit_s, own, request.inputs, earlier, request.members), results


def _request(call: MemoryCall) -> RankRequest:
    ranks = call.ranks
    arguments = [Arguments()] * len(ranks.actors)
    return RankRequest(ranks, call.method, ranks.memory_methods[call.method], arguments, exclusive=True)


def _share(one: Ranks, other: Ranks) -> bool:
    return not one.devices.isdisjoint(other.devices)


turns = Turns()
"""Those of this process."""
