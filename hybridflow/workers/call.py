"""A call on the ranks of a group: waiting for the ranks, and the end of the groups that a failure of it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.runtime import ray_runtime
from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.workers.context import Answer
from hybridflow.workers.failure_diagnosis import (
    DIED_WITHOUT_A_WORD,
    ENDED_FOR_MEMORY,
    GRACE_S,
    INPUT_LOST,
    CallState,
    Kind,
    error_of,
    findings,
    kind_of,
)
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.waits import StandsStillError, Wait, waits

_LOOK_S = 0.2  # at what has happened already
_LOOK_EVERY_S = 1.0  # at earlier calls, while ranks wait for their turn


class Call:
    """A call on the ranks of a group, answered or not: what there is to wait for, apart from the results.

    Args:
        ranks, method: what was called.
        limit_s: for an answer, in seconds, unless who waits says otherwise.
        statuses: one a rank: an `Answer`, a `Failure`, or anything else for success.
        inputs: the calls that make what it needs: one that failed, or has not answered either, is the cause.
        earlier: the calls after whose end it has its turn: one that failed is the cause, one that is slow is not.
        members: the ranks that are called, in the order of their numbers; all of the group if None.
    """

    def __init__(
        self,
        ranks: Ranks,
        method: str,
        limit_s: float,
        statuses: Sequence[ray.ObjectRef],
        inputs: Sequence[Call] = (),
        earlier: Sequence[Call] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        self.ranks, self.method, self.statuses = ranks, method, list(statuses)
        self.limit_s = limit_s
        self.members = range(len(self.statuses)) if members is None else members
        self._actors = tuple(ranks.actors)  # the group has none any more once it is dead
        self._inputs: Sequence[Call] = inputs
        self.earlier: Sequence[Call] = earlier
        self._answered = False
        self.spans: tuple[Span, ...] = ()
        """When each rank computed, once all have answered."""

    def __str__(self) -> str:
        return f"{self.ranks.role}.{self.method}"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks. Raises as `Future.result` does."""
        if self._answered:
            return
        self.ranks.check(self.method)
        limit = self.limit_s if timeout_s is None else timeout_s
        with waits.on(self.ranks, self.method, self.members) as wait, termination.waiting():
            try:
                failures, silent = self._outcome(limit, wait)
            except StandsStillError as found:
                self._end_of_standstill(found)
        if (failures or silent) and self.ranks.failure is not None:
            raise self.ranks.failure  # which another call has met, and ended the group for
        if failures or silent:
            calls: dict[CallState, Call] = {}
            _end(self._state(failures, silent, calls), limit, calls)
        self._answer()

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        ready, _ = ray.wait(self.statuses, num_returns=len(self.statuses), timeout=0)
        return len(ready) == len(self.statuses)

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        if not self._answered:
            self.ranks.kill()

    def ended(self) -> bool:
        """Whether no rank is at it any more: all have answered or failed, or the group is gone."""
        return not self.ranks.is_alive or self.done()

    def is_over(self) -> bool:
        """Whether nobody need look at it any more: it has ended, and what it failed of is told to whoever made it."""
        return self.ended() and (self._answered or not self._moves_memory or not self.ranks.is_alive)

    @property
    def _moves_memory(self) -> bool:
        """Whether only those wait for it whose turn it lets in."""
        return self.method in self.ranks.memory_methods

    def _end_of_standstill(self, found: StandsStillError) -> NoReturn:
        """End the group that keeps this one waiting, and this one, and raise why."""
        place, verdict = found.verdict.place, found.verdict
        # What it said last may be of before this call.
        method = self.method if place.role == self.ranks.role else verdict.method or "idle"
        failure = Failure(place.role, place.rank, method, verdict.reason, False, verdict.since, stack="")
        error = error_of(failure, found.ranks.log_path(place.rank))
        waits.collect_stacks()
        for ranks in (found.ranks, self.ranks):
            ranks.fail(error)
        raise error

    def _outcome(self, limit: float, wait: Wait) -> tuple[list[Failure], list[int]]:
        """Wait for the statuses. Raises if an earlier call fails meanwhile, by which ranks only get their turn."""
        deadline = time.monotonic() + limit
        while earlier := [each for each in self.earlier if not each.ended()]:
            look = min(deadline - time.monotonic(), _LOOK_EVERY_S)
            failures, silent = self._statuses_within(look, wait)
            if failures or not silent or look < _LOOK_EVERY_S:
                return failures, silent
            for each in earlier:
                calls: dict[CallState, Call] = {}
                state = each._looked_at(calls, silence_counts=False)
                if state is not None and state.failures:
                    _end(state, 0.0, calls)
        return self._statuses_within(deadline - time.monotonic(), wait)

    def _statuses_within(self, timeout_s: float, wait: Wait | None = None) -> tuple[list[Failure], list[int]]:
        told = {"silent": wait.progress} if wait is not None else {}
        return _wait_for_statuses(
            self.ranks.role, self.method, self.statuses, self._actors, timeout_s, numbers=self.members, **told
        )

    def _answer(self) -> None:
        self._answered = True
        self.spans = tuple(value.span for value in ray.get(self.statuses) if isinstance(value, Answer))
        timeline.record(self.spans)
        for each in (*self._inputs, *self.earlier):  # for which nobody need wait
            if each._answered or not each.ranks.is_alive:
                continue
            failures, silent = each._statuses_within(_LOOK_S)
            if failures and each._moves_memory:
                calls: dict[CallState, Call] = {}
                _end(each._state(failures, silent, calls), 0.0, calls)
            if not failures and not silent:
                each._answer()
        self._inputs = self.earlier = ()

    def _state(self, failures: Sequence[Failure], silent: Sequence[int], calls: dict[CallState, Call]) -> CallState:
        """What is known of it and of the calls that it depends on; `calls` gets the call of each state."""
        inputs = [each._looked_at(calls, silence_counts=not failures) for each in self._inputs]
        earlier = [each._looked_at(calls, silence_counts=False) for each in self.earlier]
        state = CallState(
            self.ranks.role,
            self.method,
            tuple(failures),
            tuple(silent),
            inputs=tuple(each for each in inputs if each is not None),
            earlier=tuple(each for each in earlier if each is not None),
            log_dir=self.ranks.log_dir,
        )
        calls[state] = self
        return state

    def _looked_at(self, calls: dict[CallState, Call], *, silence_counts: bool) -> CallState | None:
        """As `_state`, of a call on which another depends; None if it went well or its group is gone.

        Args:
            calls: gets the call of each state.
            silence_counts: whether what it depends on itself matters where it has failed nowhere.
        """
        if self._answered or not self.ranks.is_alive:
            return None
        failures, silent = self._statuses_within(_LOOK_S)
        if failures and silent:
            failures, silent = self._statuses_within(GRACE_S)  # the first that is heard of need not be the cause
        if failures or (silent and silence_counts):
            return self._state(failures, silent, calls)
        state = CallState(self.ranks.role, self.method, (), tuple(silent), log_dir=self.ranks.log_dir)
        calls[state] = self
        return state


def _end(state: CallState, limit_s: float, calls: dict[CallState, Call]) -> NoReturn:
    """End the groups that a failed call ends, each with its own error, and raise the cause."""
    found = findings(state, limit_s)
    waits.collect_stacks()
    for each in found:
        calls[each.call].ranks.fail(each.error)
    raise found[-1].error


def _wait_for_statuses(
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
            failure = _failure_in(role, rank, method, status, actors[rank])
            if failure is not None:
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures.append(failure)
                if kind_of(failure) == Kind.RAISED:
                    return failures, sorted(waiting.values())
        silent(sorted(waiting.values()))
    return failures, sorted(waiting.values())


def _failure_in(role: str, rank: int, method: str, status: ray.ObjectRef, actor: ActorHandle) -> Failure | None:
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
