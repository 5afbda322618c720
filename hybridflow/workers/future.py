"""The result of a call on a group, there or not yet.

T is what the protocol makes of the ranks' results. The samples of a `Future[SampleBatch]` and the columns of a
`Future[Columns]` stay where they were made. `batch` refers to the samples. `per_sample` and `notes` fetch the small
parts of `Columns`, whose `result` raises.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import RemoteBatch, SampleAssignment, in_order
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns, Summary, joined_per_sample, unpack
from hybridflow.metrics.timeline import TimelineSpan
from hybridflow.workers.call import GroupCall
from hybridflow.workers.failure_diagnosis import GRACE_S, RankError, most_telling_error
from hybridflow.workers.shards import ShardedData, concatenate


class Future[T]:
    """The result of a call on a group, once all ranks have answered.

    Args:
        call: the call to wait for.
        results: reference to the result of each rank.
        collected: the ranks whose results make up that of the call, in order.
        joined: True if these are joined into one; their list otherwise.
        assignment: samples of the ranks, if the call was made with a `RemoteBatch`.
    """

    def __init__(
        self,
        call: GroupCall,
        results: Sequence[ray.ObjectRef],
        collected: Sequence[int],
        *,
        joined: bool,
        assignment: SampleAssignment | None = None,
    ) -> None:
        self.call, self._joined = call, joined
        indices = [call.members.index(rank) for rank in collected]
        self._statuses = [call.statuses[index] for index in indices]
        self.refs = [results[index] for index in indices]
        """Reference to the result of each collected rank."""
        self.nodes = [call.ranks.locations[rank].node for rank in collected]
        """Ray's id of the node of each collected rank."""
        self.shard_indices = None if assignment is None else [assignment.shards[rank].indices for rank in collected]
        """Samples of each collected rank, if the call was made with a `RemoteBatch`."""
        self.sample_ids = None if assignment is None else assignment.sample_ids
        """Sample ids of that batch."""

    def __str__(self) -> str:
        return str(self.call)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for all ranks and return what the protocol makes of their results.

        Rows that belong to the samples of a `RemoteBatch` come in their order.

        Args:
            timeout_s: how long to wait, in seconds, before its turn and in it; the method's or the group's limit if
                None.

        Raises:
            RankError: a rank failed, died, or did not answer in time; the group is dead. Or one of an earlier call
                failed, after whose end this one has its turn; that group is dead.
            RankUserError: a rank refused its input; the group is dead.
            EngineError: the ranks returned `Columns`. Use `per_sample`, `notes` or `RemoteBatch.with_columns`.
        """
        self.wait(timeout_s)
        values = [unpack(value) for value in self._fetched()]
        if any(isinstance(value, Columns) for value in values):
            raise EngineError(f"{self}: returned columns, which are joined to a batch; ask for `per_sample` or `notes`")
        collected: Any = values  # a T by the method's protocol
        if self._joined and self.shard_indices is not None and _by_sample(values, self.shard_indices):
            collected = in_order(concatenate(values), self.shard_indices)
        elif self._joined:
            collected = concatenate(values)
        return collected  # type: ignore[no-any-return]

    def batch(self: Future[SampleBatch]) -> RemoteBatch:
        """Wait for all ranks. Return their samples as one batch, whose tokens stay where they are.

        Raises as `result` does.
        """
        return RemoteBatch.of_results(self._summaries(), self.refs, self.nodes)

    def per_sample(self: Future[Columns]) -> dict[str, Tensor]:
        """Wait for all ranks. Return the per-sample columns of their `Columns` in the order of the call's batch."""
        joined = joined_per_sample([summary.per_sample for summary in self._summaries()])
        assert self.shard_indices is not None
        return {name: in_order(column, self.shard_indices) for name, column in joined.items()}

    def notes(self: Future[Columns]) -> list[Any]:
        """Wait for all ranks. Return the note of each shard's `Columns`."""
        return [summary.note for summary in self._summaries()]

    def _summaries(self) -> list[Summary]:
        self.wait()
        summaries: list[Summary | None] = [answer.summary for answer in ray.get(self._statuses)]
        present = [summary for summary in summaries if summary is not None]
        if len(present) < len(summaries):
            raise EngineError(f"{self}: returned neither a batch nor columns, expected one of them")
        return present

    def _fetched(self) -> list[Any]:
        limit_s = self.call.ranks.call_timeout_s
        try:
            values: list[Any] = ray.get(self.refs, timeout=limit_s)
        except GetTimeoutError:
            raise RankError(
                f"{self}: all ranks answered, and their results did not arrive within {limit_s:g} s"
            ) from None
        return values

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks and leave the results where they are. Raises as `result` does."""
        self.call.wait(timeout_s)

    @property
    def spans(self) -> tuple[TimelineSpan, ...]:
        """Compute span of each rank; none before all have answered."""
        return self.call.spans

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        self.call.abandon()

    def done(self) -> bool:
        """True once every rank has answered or failed."""
        return self.call.done()

    def shards(self) -> ShardedData:
        """Return the results as references, one a collected rank, to pass on without a fetch."""
        return ShardedData(tuple(self.refs))


def _by_sample(values: Sequence[Any], shards: Sequence[Sequence[int]]) -> bool:
    """True if each shard's result has an entry for each of its samples, and no sample is in two shards."""
    apart = len({sample for shard in shards for sample in shard}) == sum(map(len, shards))
    return apart and all(
        isinstance(value, Tensor | list) and len(value) == len(shard)
        for value, shard in zip(values, shards, strict=True)
    )


def as_they_answer(futures: Sequence[Future[Any]]) -> Generator[int, None, None]:
    """Wait for calls, and yield the index of each as it is answered.

    Raises:
        RankError, RankUserError: a call failed; the group of every other that is unfinished is dead then, as it is
            when the caller stops before the last.
    """
    with ThreadPoolExecutor(len(futures), thread_name_prefix="wait") as threads:
        waiting = {threads.submit(future.wait): index for index, future in enumerate(futures)}
        try:
            for answered in as_completed(waiting):
                answered.result()
                yield waiting[answered]
        finally:
            for future in futures:
                future.abandon()


def wait_together(*futures: Future[Any]) -> None:
    """Wait for calls of several groups whose ranks wait for each other.

    Raises:
        RankError, RankUserError: what failed first for a reason of its own; every group whose call is unfinished is
            dead, since its ranks may wait for one that is.
    """
    # One thread a call: a group whose ranks hang must not hide that another's have failed.
    with ThreadPoolExecutor(len(futures), thread_name_prefix="wait") as threads:
        waiting = [threads.submit(future.wait) for future in futures]
        try:
            wait(waiting, return_when=FIRST_EXCEPTION)
            if all(waiter.done() for waiter in waiting) and not any(waiter.exception() for waiter in waiting):
                return
            wait(waiting, timeout=GRACE_S)
            errors = [error for waiter in waiting if waiter.done() and (error := waiter.exception()) is not None]
        finally:
            for future in futures:
                future.abandon()
    raise most_telling_error(errors)
