"""Statuses of the ranks of a call: waiting for them, and what Ray says of a rank that has none to give."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.cluster.runtime import ray_runtime
from hybridflow.errors.rank_failure import Failure
from hybridflow.workers.failure_diagnosis import (
    DIED_WITHOUT_A_WORD,
    ENDED_FOR_MEMORY,
    GRACE_S,
    INPUT_LOST,
    Kind,
    kind_of,
)


def wait_for_statuses(
    role: str,
    method: str,
    statuses: Sequence[ray.ObjectRef],
    actors: Sequence[ActorHandle],
    timeout_s: float,
    silent: Callable[[Sequence[int]], None] = lambda _: None,
    numbers: Sequence[int] | None = None,
) -> tuple[list[Failure], list[int]]:
    """Wait until every rank has answered, one has failed for a reason of its own, or the time is up.

    Args:
        role, method: for the failures that are made here.
        statuses: one a rank that was called: a `Failure`, or anything else for success.
        actors: all ranks of the group, to tell a rank's own death from that of a process that made its input.
        timeout_s: limit in seconds.
        silent: is called with the ranks that have not answered, again and again.
        numbers: of the ranks that were called; all of the group if None.

    Returns:
        The failures so far, and the ranks that have not answered.

    Raises:
        EngineError: a part of the local Ray is gone.
    """
    deadline = time.monotonic() + timeout_s
    waiting = dict(zip(statuses, range(len(statuses)) if numbers is None else numbers, strict=True))
    failures: list[Failure] = []
    while waiting:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        # One second at most, so that signals to this process are served.
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(remaining, 1.0))
        ray_runtime.check_ray()
        for status in ready:
            rank = waiting.pop(status)
            failure = _outcome(role, rank, method, status, actors[rank])
            if failure is not None:
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures.append(failure)
                if kind_of(failure) == Kind.RAISED:
                    return failures, sorted(waiting.values())
        silent(sorted(waiting.values()))
    return failures, sorted(waiting.values())


def _outcome(role: str, rank: int, method: str, status: ray.ObjectRef, actor: ActorHandle) -> Failure | None:
    def failed(error: str) -> Failure:
        return Failure(role, rank, method, error, user_error=False, time=time.time(), stack="")

    try:
        value = ray.get(status)
    except RayActorError as error:
        if error.actor_id is not None and error.actor_id != actor._actor_id.hex():
            return failed(INPUT_LOST)
        # Not "OOM", which Ray names among the possible causes of any death.
        return failed(ENDED_FOR_MEMORY if "low on memory" in str(error) else DIED_WITHOUT_A_WORD)
    except OutOfMemoryError:
        return failed(ENDED_FOR_MEMORY)
    except RayTaskError as error:
        return failed(" ".join(f"{type(error.cause).__name__}: {error.cause}".split()))
    except RayError as error:
        return failed(" ".join(f"{type(error).__name__}: {error}".split()))
    return value if isinstance(value, Failure) else None
