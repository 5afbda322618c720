"""Turns: groups that share devices compute on them one after another, in the order in which they were called.

Only methods that are registered as exclusive take turns. A rank waits for calls that were made before its own, so that
no two wait for one another; what is registered otherwise neither waits nor is waited for, as calls of two groups that
only end together must not. When the turn goes to another group, the previous one releases device memory: its
`offload` is called, where its worker has one; and its `onload` before its next turn.

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

from hybridflow.workers.call import GroupCall
from hybridflow.workers.methods import Arguments
from hybridflow.workers.ranks import Ranks

OFFLOAD = "offload"
"""Method of a group that is called when its turn is over."""
ONLOAD = "onload"
"""Method of an offloaded group that is called before its next turn."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A call to send.

    Args:
        ranks, method: what is called.
        limit_s: for an answer, in seconds.
        arguments: of each rank that is called, each stored already where it is large.
        collected: the ranks whose results are kept.
        exclusive: True if it takes turns with groups that share its devices.
        inputs: the calls that make its inputs.
        members: the ranks that are called, in the order of their numbers; all of the group if None.
    """

    ranks: Ranks
    method: str
    limit_s: float
    arguments: Sequence[Arguments]
    collected: Collection[int] = ()
    exclusive: bool = False
    inputs: Sequence[GroupCall] = ()
    members: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """A call that offloads a group or onloads it."""

    ranks: Ranks
    method: str


def memory_calls(ranks: Ranks, memory: Iterable[tuple[Ranks, Literal["resident", "offloaded"]]]) -> list[MemoryCall]:
    """Return the calls before a group's turn, in order: others offload, then it onloads.

    Args:
        ranks: of the group.
        memory: of the groups that have computed, the group itself among them.
    """
    memory = [(group, state) for group, state in memory if group.is_alive and group.failure is None]
    offloading = [
        MemoryCall(other, OFFLOAD)
        for other, state in memory
        if other is not ranks and state == "resident" and _share(ranks, other) and OFFLOAD in other.memory_methods
    ]
    offloaded = any(group is ranks and state == "offloaded" for group, state in memory)
    return offloading + ([MemoryCall(ranks, ONLOAD)] if offloaded and ONLOAD in ranks.memory_methods else [])


class Turns:
    """Turns of groups on shared devices. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[GroupCall] = []
        self._memory: weakref.WeakKeyDictionary[Ranks, Literal["resident", "offloaded"]] = weakref.WeakKeyDictionary()

    def send(self, request: RankRequest) -> tuple[GroupCall, list[ray.ObjectRef]]:
        """Send a call to every rank after the memory calls of its turn. Return the call and references to its results.

        Raises:
            RankError, RankUserError: the group has died of this error.
            EngineError: it has been shut down.
        """
        with self._lock:
            if request.exclusive and request.method not in (OFFLOAD, ONLOAD):
                for memory_call in memory_calls(request.ranks, self._memory.items()):
                    call, _ = self._sent(_request(memory_call))
                    if memory_call.ranks is request.ranks:
                        request = replace(request, inputs=(*request.inputs, call))
            return self._sent(request)

    def remove(self, ranks: Ranks) -> None:
        """Remove a group whose ranks are gone."""
        with self._lock:
            self._memory.pop(ranks, None)
            self._calls = [call for call in self._calls if call.ranks is not ranks]

    def is_offloaded(self, ranks: Ranks) -> bool:
        """True if a group was offloaded and has not computed since."""
        with self._lock:
            return self._memory.get(ranks) == "offloaded"

    def _sent(self, request: RankRequest) -> tuple[GroupCall, list[ray.ObjectRef]]:
        """Send this call alone. The lock is held."""
        if not request.exclusive:
            return _send(request)
        call, results = _send(request, self._earlier(request.ranks))
        self._calls.append(call)
        self._memory[call.ranks] = "offloaded" if call.method == OFFLOAD else "resident"
        return call, results

    def _earlier(self, ranks: Ranks) -> list[GroupCall]:
        """Return the calls whose end a group's next call waits for, in the order in which they were sent.

        Calls that those wait for in turn are among them, so that every waiting caller gets the cause of a failure.
        """
        self._calls = [call for call in self._calls if not call.is_over()]
        before = [call for call in self._calls if call.ranks is not ranks and _share(ranks, call.ranks)]
        needed = {id(earlier_call) for call in before for earlier_call in (call, *call.earlier)}
        return [call for call in self._calls if id(call) in needed]


def _send(request: RankRequest, earlier: Sequence[GroupCall] = ()) -> tuple[GroupCall, list[ray.ObjectRef]]:
    """Send a call to the ranks without a wait. Return the call and a reference to each rank's result.

    Args:
        request: the call.
        earlier: calls whose end it waits for before its turn.

    Raises:
        RankError, RankUserError: the group has died of this error.
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
        .remote(method, rank in request.collected, statuses, *arguments.positional, **arguments.keyword)
        for rank, arguments in zip(members, request.arguments, strict=True)
    ]
    own_statuses, results = ([answer[index] for answer in answers] for index in (0, 1))
    return GroupCall(ranks, method, request.limit_s, own_statuses, request.inputs, earlier, request.members), results


def _request(call: MemoryCall) -> RankRequest:
    ranks = call.ranks
    arguments = [Arguments()] * len(ranks.actors)
    return RankRequest(ranks, call.method, ranks.memory_methods[call.method], arguments, exclusive=True)


def _share(one: Ranks, other: Ranks) -> bool:
    return not one.devices.isdisjoint(other.devices)


turns = Turns()
"""Turns of this process's groups."""
