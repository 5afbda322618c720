"""Sending a call to every rank of a group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ray

from hybridflow.workers.call import Call
from hybridflow.workers.methods import Arguments
from hybridflow.workers.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call that is to be sent.

    Args:
        ranks, method: what is called.
        limit_s: for an answer, in seconds.
        arguments: of each rank, each stored already where it is large.
        wanted: the ranks whose results are wanted.
        exclusive: whether it takes turns with groups that share its devices.
        inputs: the calls that make what it needs.
    """

    ranks: Ranks
    method: str
    limit_s: float
    arguments: Sequence[Arguments]
    wanted: Collection[int] = ()
    exclusive: bool = False
    inputs: Sequence[Call] = ()


def send(request: Request, earlier: Sequence[Call] = ()) -> tuple[Call, list[ray.ObjectRef]]:
    """Send a call to every rank: the call, and where each rank's result will lie. Waits for nobody.

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
    # Within an object of its own: Ray would wait for arguments, and fail the call with one that failed.
    statuses = ray.put([status for call in earlier for status in call.statuses]) if earlier else ()
    answers: list[tuple[ray.ObjectRef, ray.ObjectRef]] = [
        actor.call.options(num_returns=2).remote(
            method, rank in request.wanted, statuses, *arguments.positional, **arguments.keyword
        )
        for rank, (actor, arguments) in enumerate(zip(actors, request.arguments, strict=True))
    ]
    call = Call(ranks, method, request.limit_s, [status for status, _ in answers], request.inputs, earlier)
    return call, [result for _, result in answers]
