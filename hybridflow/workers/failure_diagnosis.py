"""Waiting for the ranks of a call, and saying which failure is the cause where several ranks report one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from engine3d.errors import EngineError, UserError
from engine3d.out_of_memory import OUT_OF_MEMORY
from hybridflow.cluster import ray_runtime
from hybridflow.errors.rank_failure import Failure

# A lost neighbour often reaches the others before Ray knows of it: how long to wait for the rank that was first.
GRACE_S = 3.0

# What a rank reports whose neighbour went away in the middle of a collective.
_LOST_NEIGHBOUR = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo|nccl|process ?group|tcpstore|DistBackendError"
    r"|DistNetworkError|socket (timeout|closed)|timed out waiting"
    r"|\b(is gone|did not (answer|come) within)\b",
    re.IGNORECASE,
)


_LESS_SERVING = "a smaller rollout.engine.mem_fraction_static, max_total_tokens or max_running_requests"
_LESS_TRAINING = (
    "a smaller train.micro_batch_tokens, train.recompute=full, train.optimizer.precision_aware=true, "
    "rollout.engine.memory_saver=true, more of tp, pp and ep in train.layout, or more GPUs"
)


class RankError(EngineError):
    """A rank failed, died or did not answer. The message is one line with role, rank, method, cause and log."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        """What the rank reported, its stack included; None where it could not."""


class RankUserError(UserError):
    """A rank refused its input: what the user can put right, with the rank that found it."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


def wait_for_statuses(
    role: str,
    method: str,
    statuses: Sequence[ray.ObjectRef],
    actors: Sequence[ActorHandle],
    timeout_s: float,
    silent: Callable[[Sequence[int]], None] = lambda _: None,
) -> tuple[list[Failure], list[int]]:
    """Wait until every rank has answered, one has failed for a reason of its own, or the time is up.

    Args:
        role, method: for the failures that are made here.
        statuses: one a rank: a `Failure`, or anything else for success.
        actors: the ranks, to tell a rank's own death from that of a process that made its input.
        timeout_s: limit in seconds.
        silent: is called with the ranks that have not answered, again and again.

    Returns:
        The failures so far, and the ranks that have not answered.

    Raises:
        EngineError: a part of the local Ray is gone.
    """
    deadline = time.monotonic() + timeout_s
    waiting = {status: rank for rank, status in enumerate(statuses)}
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
                if _kind(failure) == 0:
                    return failures, sorted(waiting.values())
        silent(sorted(waiting.values()))
    return failures, sorted(waiting.values())


def most_telling(failures: Sequence[Failure]) -> Failure:
    """The cause among failures: what a rank raised itself, else a death, else a lost neighbour; the first in time."""
    return min(failures, key=lambda failure: (_kind(failure), failure.time, failure.rank))


def most_telling_error(errors: Sequence[BaseException]) -> BaseException:
    """The same among the errors of several groups; one that came without a rank's report tells least."""

    def order(error: BaseException) -> tuple[int, float]:
        failure: Failure | None = getattr(error, "failure", None)
        return (_kind(failure), failure.time) if failure is not None else (_SILENT, 0.0)

    return min(errors, key=order)


def error_of(failure: Failure, log_path: Path | None) -> RankError | RankUserError:
    """The exception for the caller."""
    log = f" (log: {log_path})" if log_path else ""
    told = f"{where(failure.role, failure.method, [failure.rank])}: {failure.error}{_advice(failure)}"
    return RankUserError(told, failure) if failure.user_error else RankError(f"{told}{log}", failure)


def _advice(failure: Failure) -> str:
    """What to do where a GPU's memory was full."""
    if OUT_OF_MEMORY not in failure.error:
        return ""
    less = _LESS_SERVING if failure.role == "rollout" else _LESS_TRAINING
    return f'; see "hybridflow check RECIPE --memory"; to need less: {less}'


def where(role: str, method: str, ranks: Sequence[int]) -> str:
    """Ranks at a call, as errors name them."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{role} {which}, {method}"


def silence(role: str, method: str, ranks: Sequence[int], timeout_s: float, log_dir: Path | None) -> RankError:
    """The exception for ranks that did not answer in time."""
    log = f"; the stacks of its threads are in {log_dir}/{role}-{ranks[0]}.log" if log_dir else ""
    return RankError(f"{where(role, method, ranks)}: no answer within {timeout_s:g} s{log}")


def no_turn(role: str, method: str, ranks: Sequence[int], timeout_s: float, holder: str, log: Path | None) -> RankError:
    """The exception for ranks whose turn did not come in time, because an earlier call (`holder`) has not ended."""
    stacks = f"; the stacks of its threads are in {log}" if log else ""
    return RankError(
        f"{where(role, method, ranks)}: no turn within {timeout_s:g} s, since {holder} has not ended{stacks}"
    )


def _outcome(role: str, rank: int, method: str, status: ray.ObjectRef, actor: ActorHandle) -> Failure | None:
    def failed(error: str) -> Failure:
        return Failure(role, rank, method, error, user_error=False, time=time.time(), stack="")

    try:
        value = ray.get(status)
    except RayActorError as error:
        if error.actor_id is not None and error.actor_id != actor._actor_id.hex():
            return failed("broken pipe: the process that was to make its input died")
        return failed(_death(error))
    except OutOfMemoryError:
        return failed(_OUT_OF_MEMORY)
    except RayTaskError as error:
        return failed(" ".join(f"{type(error.cause).__name__}: {error.cause}".split()))
    except RayError as error:
        return failed(" ".join(f"{type(error).__name__}: {error}".split()))
    return value if isinstance(value, Failure) else None


_DIED = "the process died"
_OUT_OF_MEMORY = f"{_DIED}: Ray ended it because the machine was running out of memory"
_ENGINE_DIED = "EngineError: rollout engine died"  # whatever its last words were


def _death(error: RayActorError) -> str:
    # Not "OOM", which Ray names among the possible causes of any death.
    if "low on memory" in str(error):
        return _OUT_OF_MEMORY
    return f"{_DIED} without a word, as by a signal, a crash or a lack of memory"


_SILENT = 3


def _kind(failure: Failure) -> int:
    if failure.error.startswith((_DIED, _ENGINE_DIED)):
        return 1
    return 2 if not failure.user_error and _LOST_NEIGHBOUR.search(failure.error) else 0
