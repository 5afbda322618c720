"""Calls on the ranks of a group: the wait for the ranks, and the end of the groups that a failure ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.ray import ray_session
from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics.timeline import TimelineSpan, timeline
from hybridflow.workers.context import RankAnswer
from hybridflow.workers.failure_diagnosis import (
    DIED_WITHOUT_A_WORD,
    ENDED_FOR_MEMORY,
    GRACE_S,
    INPUT_LOST,
    CallState,
    Kind,
    diagnose,
    error_of,
    kind_of,
)
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.watching.waits import StandsStillError, Wait, waits

_LOOK_S = 0.2  # at what has happened already
_LOOK_EVERY_S = 1.0  # at earlier calls, while ranks wait for their turn


class GroupCall:
    """A call on the ranks of a group, answered or pending, without its results.

    Args:
        ranks, method: what was called.
        limit_s: for an answer, in seconds, unless the wait has a limit of its own.
        statuses: one a rank: a `RankAnswer`, a `Failure`, or anything else for success.
        inputs: the calls that make its inputs. One that failed, or has not answered either, is the cause of a failure.
        earlier: the calls whose end it waits for before its turn. One that failed is the cause, a slow one is not.
        members: the ranks that are called, in the order of their numbers; all of the group if None.
    """

    def __init__(
        self,
        ranks: Ranks,
        method: str,
        limit_s: float,
        statuses: Sequence[ray.ObjectRef],
        inputs: Sequence[GroupCall] = (),
        earlier: Sequence[GroupCall] = (),
        members: Sequence[int] | None = None,
    ) -> None:
        self.ranks, self.method, self.statuses = ranks, method, list(statuses)
        self.limit_s = limit_s
        self.members = range(len(self.statuses)) if members is None else members
        self._actors = tuple(ranks.actors)  # the group has none any more once it is dead
        self._inputs: Sequence[GroupCall] = inputs
        self.earlier: Sequence[GroupCall] = earlier
        self._answered = False
        self.spans: tuple[TimelineSpan, ...] = ()
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
            except StandsStillError as error:
                end_of_standstill(error, self.ranks, self.method)
        if (failures or silent) and self.ranks.failure is not None:
            raise self.ranks.failure  # which another call has met, and ended the group for
        if failures or silent:
            calls: dict[CallState, GroupCall] = {}
            _end(self._state(failures, silent, calls), limit, calls)
        self._answer()

    def done(self) -> bool:
        """True once every rank has answered or failed."""
        ready, _ = ray.wait(self.statuses, num_returns=len(self.statuses), timeout=0)
        return len(ready) == len(self.statuses)

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        if not self._answered:
            self.ranks.kill()

    def ended(self) -> bool:
        """True once every rank has returned, failed or been killed."""
        return not self.ranks.is_alive or self.done()

    def is_over(self) -> bool:
        """True once the call has ended and its failure, if any, was reported to its caller."""
        return self.ended() and (self._answered or not self._moves_memory or not self.ranks.is_alive)

    @property
    def _moves_memory(self) -> bool:
        """True if only the calls whose turn it precedes wait for it."""
        return self.method in self.ranks.memory_methods

    def _outcome(self, limit: float, wait: Wait) -> tuple[list[Failure], list[int]]:
        """Wait for the statuses. Raises if an earlier call fails meanwhile, whose end the ranks wait for."""
        deadline = time.monotonic() + limit
        while earlier := [call for call in self.earlier if not call.ended()]:
            look = min(deadline - time.monotonic(), _LOOK_EVERY_S)
            failures, silent = self._statuses_within(look, wait)
            if failures or not silent or look < _LOOK_EVERY_S:
                return failures, silent
            for call in earlier:
                calls: dict[CallState, GroupCall] = {}
                state = call._looked_at(calls, silence_counts=False)
                if state is not None and state.failures:
                    _end(state, 0.0, calls)
        return self._statuses_within(deadline - time.monotonic(), wait)

    def _statuses_within(self, timeout_s: float, wait: Wait | None = None) -> tuple[list[Failure], list[int]]:
        progress = {"silent": wait.progress} if wait is not None else {}
        return _wait_for_statuses(
            self.ranks.role, self.method, self.statuses, self._actors, timeout_s, numbers=self.members, **progress
        )

    def _answer(self) -> None:
        self._answered = True
        self.spans = tuple(value.span for value in ray.get(self.statuses) if isinstance(value, RankAnswer))
        timeline.record(self.spans)
        for call in (*self._inputs, *self.earlier):  # nobody need wait for these
            if call._answered or not call.ranks.is_alive:
                continue
            failures, silent = call._statuses_within(_LOOK_S)
            if failures and call._moves_memory:
                calls: dict[CallState, GroupCall] = {}
                _end(call._state(failures, silent, calls), 0.0, calls)
            if not failures and not silent:
                call._answer()
        self._inputs = self.earlier = ()

    def _state(
        self, failures: Sequence[Failure], silent: Sequence[int], calls: dict[CallState, GroupCall]
    ) -> CallState:
        """Return the state of the call and of the calls that it depends on. `calls` gets the call of each state."""
        inputs = [call._looked_at(calls, silence_counts=not failures) for call in self._inputs]
        earlier = [call._looked_at(calls, silence_counts=False) for call in self.earlier]
        state = CallState(
            self.ranks.role,
            self.method,
            tuple(failures),
            tuple(silent),
            inputs=tuple(call for call in inputs if call is not None),
            earlier=tuple(call for call in earlier if call is not None),
            log_dir=self.ranks.log_dir,
        )
        calls[state] = self
        return state

    def _looked_at(self, calls: dict[CallState, GroupCall], *, silence_counts: bool) -> CallState | None:
        """Return the state of a call on which another depends; None if it went well or its group is gone.

        Args:
            calls: gets the call of each state.
            silence_counts: True if the calls that it depends on matter while no rank of it has failed.
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


def end_of_standstill(standstill: StandsStillError, waiting: Ranks, method: str) -> NoReturn:
    """End the group that keeps another one waiting, and that one, and raise why. `method`: that is waited for."""
    location, verdict = standstill.verdict.location, standstill.verdict
    # What it said last may be of before this call.
    method = method if location.role == waiting.role else verdict.method or "idle"
    failure = Failure(location.role, location.rank, method, verdict.reason, False, verdict.since, stack="")
    error = error_of(failure, standstill.ranks.log_path(location.rank))
    waits.collect_stacks()
    for ranks in (standstill.ranks, waiting):
        ranks.fail(error)
    raise error


def _end(state: CallState, limit_s: float, calls: dict[CallState, GroupCall]) -> NoReturn:
    """End the groups that a failed call ends, each with its own error, and raise the cause."""
    ended = diagnose(state, limit_s)
    waits.collect_stacks()
    for diagnosis in ended:
        calls[diagnosis.call].ranks.fail(diagnosis.error)
    raise ended[-1].error


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
        silent: is called repeatedly with the ranks that have not answered.
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
        ray_session.check_ray()
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
