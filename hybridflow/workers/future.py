"""A call on a group, and its result, there or not yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NoReturn

import ray
import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import Asked, RemoteBatch, in_order
from hybridflow.batch.worker_output import Columns, Summary, joined_facts, unpack
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.workers.failure_diagnosis import (
    GRACE_S,
    RankError,
    error_of,
    most_telling,
    most_telling_error,
    no_turn,
    silence,
    wait_for_statuses,
    where,
)
from hybridflow.workers.protocols import Protocol, Shards, concatenate
from hybridflow.workers.ranks import Answer, Failure
from hybridflow.workers.waits import Wait, waits

if TYPE_CHECKING:
    from hybridflow.workers.worker_group import WorkerGroup

_LOOK_S = 0.2  # at what has happened already
_LOOK_EVERY_S = 1.0  # at earlier calls, while ranks wait for their turn


class Call:
    """A call on every rank of a group, answered or not: what there is to wait for, apart from the results.

    Args:
        group, method: what was called.
        statuses: one a rank: an `Answer`, a `Failure`, or anything else for success.
        inputs: the calls that make what it needs: one that failed, or has not answered either, is the cause.
        earlier: the calls after whose end it has its turn: one that failed is the cause, one that is slow is not.
    """

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        statuses: Sequence[ray.ObjectRef],
        inputs: Sequence[Call] = (),
        earlier: Sequence[Call] = (),
    ) -> None:
        self.group, self.method, self.statuses = group, method, list(statuses)
        self._actors = tuple(group._actors)  # the group has none any more once it is dead
        self._inputs: Sequence[Call] = inputs
        self.earlier: Sequence[Call] = earlier
        self._answered = False
        self.spans: tuple[Span, ...] = ()
        """When each rank computed, once all have answered."""

    def __str__(self) -> str:
        return f"{self.group.role}.{self.method}"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks. Raises as `Future.result` does."""
        if self._answered:
            return
        self.group._check(self.method)
        limit = self.group.limit_s(self.method) if timeout_s is None else timeout_s
        with waits.on(self) as wait:
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
            self.group.kill()

    def raise_cause(self, waited_s: float | None) -> None:
        """Raise, as the cause of what a later call met, if a rank has failed.

        Args:
            waited_s: how long the later call has waited for an answer that did not come: a rank of this call that has
                not answered either is then the cause.
        """
        if self._answered or not self.group.is_alive:
            return
        failures, silent = self._statuses_within(_LOOK_S)
        if failures and silent:
            failures, silent = self._statuses_within(GRACE_S)  # the first that is heard of need not be the cause
        if failures or (silent and waited_s is not None):
            self._fail(failures, silent, waited_s or 0.0)

    def ended(self) -> bool:
        """Whether no rank is at it any more: all have answered or failed, or the group is gone."""
        return not self.group.is_alive or self.done()

    def where(self, ranks: Sequence[int]) -> str:
        """Ranks at this call, as messages name them."""
        return where(self.group.role, self.method, ranks)

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
        return wait_for_statuses(self.group.role, self.method, self.statuses, self._actors, timeout_s, *told)

    def _answer(self) -> None:
        self._answered = True
        self.spans = tuple(value.span for value in ray.get(self.statuses) if isinstance(value, Answer))
        timeline.record(self.spans)
        for each in (*self._inputs, *self.earlier):  # for which nobody need wait
            if not each._answered and each.group.is_alive and each._statuses_within(_LOOK_S) == ([], []):
                each._answer()
        self._inputs = self.earlier = ()

    def _fail(self, failures: list[Failure], silent: list[int], limit: float) -> NoReturn:
        """Kill the group and raise the cause."""
        group = self.group
        if failures:
            failure = most_telling(failures)
            error = error_of(failure, group.log_path(failure.rank) if failure.role == group.role else None)
        else:
            error = self._silence(silent, limit)
        group._fail(error)
        for each in self._inputs:
            each.raise_cause(None if failures else limit)
        for each in self.earlier:
            each.raise_cause(None)
        raise error

    def _silence(self, silent: list[int], limit: float) -> RankError:
        for holder in self.earlier:  # all before it have ended, so that the first that has not is at work
            if not holder.ended() and (ranks := holder._statuses_within(_LOOK_S)[1]):
                holder.group._write_stacks()
                who = where(holder.group.role, holder.method, ranks)
                return no_turn(self.group.role, self.method, silent, limit, who, holder.group.log_path(ranks[0]))
        self.group._write_stacks()
        return silence(self.group.role, self.method, silent, limit, self.group.log_dir)


class Future:
    """The result of a call on a group, once all ranks have answered.

    Args:
        call: what to wait for.
        protocol: whose results are collected, and how.
        results: where the result of each rank lies.
        asked: what the call was about, if it was made with a `RemoteBatch`.
    """

    def __init__(
        self,
        call: Call,
        protocol: Protocol,
        results: Sequence[ray.ObjectRef],
        asked: Asked | None = None,
    ) -> None:
        self.call, self._protocol = call, protocol
        group = call.group
        collected = protocol.collect(group.grid)
        self._statuses = [call.statuses[rank] for rank in collected]
        self.refs = [results[rank] for rank in collected]
        """The result of each collected rank, where it lies."""
        self.nodes = [group.nodes[rank] for rank in collected]
        """Ray's id of the node of each."""
        self.parts = [asked.parts[rank].indices for rank in collected] if asked is not None else None
        """The samples of each, if the call was made with a `RemoteBatch`."""
        self.sample_ids = asked.sample_ids if asked is not None else None
        """Of that batch."""

    def __str__(self) -> str:
        return str(self.call)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for all ranks and return what the protocol makes of their results.

        Rows that belong to the samples of a `RemoteBatch` come in their order.

        Args:
            timeout_s: how long to wait, in seconds, before its turn and in it; the method's or the group's limit if
                None.

        Raises:
            RankError: a rank failed, died, or did not answer in time; the group is dead. Or one of an earlier call
                failed, after whose end this one has its turn; that group is dead.
            RankUserError: a rank refused its input; the group is dead.
            EngineError: the ranks returned `Columns`, which `facts`, `notes` and `RemoteBatch.with_columns` are for.
        """
        self.wait(timeout_s)
        values = [unpack(value) for value in self._fetched()]
        if any(isinstance(value, Columns) for value in values):
            raise EngineError(f"{self}: returned columns, which are joined to a batch; ask for their facts or notes")
        if not self._protocol.concatenate:
            return values
        if self.parts is None or not _by_sample(values, self.parts):
            return concatenate(values)
        return in_order(concatenate(_as_wide(values)), self.parts)

    def batch(self) -> RemoteBatch:
        """Wait for all ranks; the samples that they made as one batch, whose tokens stay where they are.

        Raises as `result` does.
        """
        return RemoteBatch.of_results(self._summaries(), self.refs, self.nodes)

    def facts(self) -> dict[str, Tensor]:
        """Wait for all ranks; the facts of the `Columns` that they returned, in the order of the call's batch."""
        joined = joined_facts([summary.facts for summary in self._summaries()])
        assert self.parts is not None
        return {name: in_order(fact, self.parts) for name, fact in joined.items()}

    def notes(self) -> list[Any]:
        """Wait for all ranks; the note of each part's `Columns`."""
        return [summary.note for summary in self._summaries()]

    def _summaries(self) -> list[Summary]:
        self.wait()
        summaries: list[Summary | None] = [answer.summary for answer in ray.get(self._statuses)]
        found = [summary for summary in summaries if summary is not None]
        if len(found) < len(summaries):
            raise EngineError(f"{self}: returned neither a batch nor columns, expected one of them")
        return found

    def _fetched(self) -> list[Any]:
        limit_s = self.call.group.call_timeout_s
        try:
            found: list[Any] = ray.get(self.refs, timeout=limit_s)
        except GetTimeoutError:
            raise RankError(
                f"{self}: all ranks answered, and their results did not arrive within {limit_s:g} s"
            ) from None
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks and leave the results where they are. Raises as `result` does."""
        self.call.wait(timeout_s)

    @property
    def spans(self) -> tuple[Span, ...]:
        """When each rank computed; none before all have answered."""
        return self.call.spans

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        self.call.abandon()

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return self.call.done()

    def shards(self) -> Shards:
        """The results as references, one a collected rank, to pass on without fetching them."""
        return Shards(tuple(self.refs))


def _by_sample(values: Sequence[Any], parts: Sequence[Sequence[int]]) -> bool:
    """Whether each part's result has an entry for each of its samples, and no sample is in two parts."""
    apart = len({sample for part in parts for sample in part}) == sum(map(len, parts))
    return apart and all(
        isinstance(value, Tensor | list) and len(value) == len(part) for value, part in zip(values, parts, strict=True)
    )


def _as_wide(values: Sequence[Any]) -> list[Any]:
    """Tokens' columns, each as wide as its own part, padded with 0 to the widest."""
    if not all(isinstance(value, Tensor) and value.dim() == 2 for value in values):
        return list(values)
    width = max(value.shape[1] for value in values)
    return [torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in values]


def wait_together(*futures: Future) -> None:
    """Wait for calls of several groups whose ranks wait for one another.

    Raises:
        RankError, RankUserError: what failed first for a reason of its own; every group whose call is unfinished is
            dead, since its ranks may wait for one that is.
    """
    # One thread a call: a group whose ranks hang must not hide that another's have failed.
    with ThreadPoolExecutor(len(futures), thread_name_prefix="wait") as threads:
        waiting = [threads.submit(future.wait) for future in futures]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
            if all(each.done() for each in waiting) and not any(each.exception() for each in waiting):
                return
            wait(waiting, timeout=GRACE_S)
            errors = [error for each in waiting if each.done() and (error := each.exception()) is not None]
        finally:
            for future in futures:
                future.abandon()
    raise most_telling_error(errors)
