"""Sending a call to the ranks of a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ray

from hybridflow.workers.call import Call
from hybridflow.workers.methods import Arguments
from hybridflow.workers.ranks import Ranks


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


def send(request: RankRequest, earlier: Sequence[Call] = ()) -> tuple[Call, list[ray.ObjectRef]]:
    """Send a call to the ranks: the call, and where each rank's result will lie. Waits for nobody.

    `Turns.send` alone calls it, which holds the order of calls.

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
