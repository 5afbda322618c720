"""A call on every rank of a group: waiting for it, and the cause of its failure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import ray

from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.workers.context import Answer
from hybridflow.workers.failure_diagnosis import (
    GRACE_S,
    RankError,
    error_of,
    most_telling,
    no_turn,
    silence,
    wait_for_statuses,
    where,
)
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.waits import Wait, waits

_LOOK_S = 0.2  # at what has happened already
_LOOK_EVERY_S = 1.0  # at earlier calls, while ranks wait for their turn


class Call:
    """A call on every rank of a group, answered or not: what there is to wait for, apart from the results.

    Args:
        ranks, method: what was called.
        limit_s: for an answer, in seconds, unless who waits says otherwise.
        statuses: one a rank: an `Answer`, a `Failure`, or anything else for success.
        inputs: the calls that make what it needs: one that failed, or has not answered either, is the cause.
        earlier: the calls after whose end it has its turn: one that failed is the cause, one that is slow is not.
    """

    def __init__(
        self,
        ranks: Ranks,
        method: str,
        limit_s: float,
        statuses: Sequence[ray.ObjectRef],
        inputs: Sequence[Call] = (),
        earlier: Sequence[Call] = (),
    ) -> None:
        self.ranks, self.method, self.statuses = ranks, method, list(statuses)
        self.limit_s = limit_s
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
        with waits.on(self.ranks, self.method, len(self.statuses)) as wait:
            failures, silent = self._outcome(limit, wait)
        if failures or silent:
            self._fail(failures, silent, limit)
        self._answer()

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        ready, _ = ray.wait(self.statuses, num_returns=len(self.statuses), timeout=0)
        return len(ready) == len(self.statuses)

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        if not self._answered:
            self.ranks.kill()

    def raise_cause(self, waited_s: float | None) -> None:
        """Raise, as the cause of what a later call met, if a rank has failed.

        Args:
            waited_s: how long the later call has waited for an answer that did not come: a rank of this call that has
                not answered either is then the cause.
        """
        if self._answered or not self.ranks.is_alive:
            return
        failures, silent = self._statuses_within(_LOOK_S)
        if failures and silent:
            failures, silent = self._statuses_within(GRACE_S)  # the first that is heard of need not be the cause
        if failures or (silent and waited_s is not None):
            self._fail(failures, silent, waited_s or 0.0)

    def ended(self) -> bool:
        """Whether no rank is at it any more: all have answered or failed, or the group is gone."""
        return not self.ranks.is_alive or self.done()

    def _outcome(self, limit: float, wait: Wait) -> tuple[list[Failure], list[int]]:
        """As `wait_for_statuses`; raises if an earlier call fails meanwhile, by which the ranks only get their turn."""
        deadline = time.monotonic() + limit
        while earlier := [each for each in self.earlier if not each.ended()]:
            look = min(deadline - time.monotonic(), _LOOK_EVERY_S)
            failures, silent = self._statuses_within(look, wait)
            if failures or not silent or look < _LOOK_EVERY_S:
                return failures, silent
            for each in earlier:
                each.raise_cause(None)
        return self._statuses_within(deadline - time.monotonic(), wait)

    def _statuses_within(self, timeout_s: float, wait: Wait | None = None) -> tuple[list[Failure], list[int]]:
        told = [wait.progress] if wait is not None else []
        return wait_for_statuses(self.ranks.role, self.method, self.statuses, self._actors, timeout_s, *told)

    def _answer(self) -> None:
        self._answered = True
        self.spans = tuple(value.span for value in ray.get(self.statuses) if isinstance(value, Answer))
        timeline.record(self.spans)
        for each in (*self._inputs, *self.earlier):  # for which nobody need wait
            if not each._answered and each.ranks.is_alive and each._statuses_within(_LOOK_S) == ([], []):
                each._answer()
        self._inputs = self.earlier = ()

    def _fail(self, failures: list[Failure], silent: list[int], limit: float) -> NoReturn:
        """Kill the group and raise the cause."""
        ranks = self.ranks
        if failures:
            failure = most_telling(failures)
            error = error_of(failure, ranks.log_path(failure.rank) if failure.role == ranks.role else None)
        else:
            error = self._silence(silent, limit)
        ranks.fail(error)
        for each in self._inputs:
            each.raise_cause(None if failures else limit)
        for each in self.earlier:
            each.raise_cause(None)
        raise error

    def _silence(self, silent: list[int], limit: float) -> RankError:
        for holder in self.earlier:  # all before it have ended, so that the first that has not is at work
            if not holder.ended() and (late := holder._statuses_within(_LOOK_S)[1]):
                holder.ranks.write_stacks()
                who = where(holder.ranks.role, holder.method, late)
                return no_turn(self.ranks.role, self.method, silent, limit, who, holder.ranks.log_path(late[0]))
        self.ranks.write_stacks()
        return silence(self.ranks.role, self.method, silent, limit, self.ranks.log_dir)
