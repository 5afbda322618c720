"""A call on the ranks of a group: waiting for it, and ending the groups that its failure ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import ray

from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.workers.context import Answer
from hybridflow.workers.failure_diagnosis import GRACE_S, CallState, error_of, findings
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.statuses import wait_for_statuses
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
        """As `wait_for_statuses`; raises if an earlier call fails meanwhile, by which the ranks only get their turn."""
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
        return wait_for_statuses(
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
