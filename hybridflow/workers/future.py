"""The result of a call on a group, there or not yet.

T is what the protocol makes of the ranks' results. The samples of a `Future[SampleBatch]` and the columns of a
`Future[Columns]` stay where they were made: `batch` refers to the ones, `facts` and `notes` fetch what is small of the
others, whose `result` raises.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import Asked, RemoteBatch, in_order
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns, Summary, joined_facts, unpack
from hybridflow.metrics.timeline import Span
from hybridflow.workers.call import Call
from hybridflow.workers.failure_diagnosis import GRACE_S, RankError, most_telling_error
from hybridflow.workers.shards import Shards, concatenate


class Future[T]:
    """The result of a call on a group, once all ranks have answered.

    Args:
        call: what to wait for.
        results: where the result of each rank lies.
        collected: the ranks whose results make up that of the call, in order.
        joined: whether these are joined into one; their list otherwise.
        asked: what the call was about, if it was made with a `RemoteBatch`.
    """

    def __init__(
        self,
        call: Call,
        results: Sequence[ray.ObjectRef],
        collected: Sequence[int],
        *,
        joined: bool,
        asked: Asked | None = None,
    ) -> None:
        self.call, self._joined = call, joined
        places = [call.members.index(rank) for rank in collected]
        self._statuses = [call.statuses[place] for place in places]
        self.refs = [results[place] for place in places]
        """The result of each collected rank, where it lies."""
        self.nodes = [call.ranks.places[rank].node for rank in collected]
        """Ray's id of the node of each."""
        self.parts = [asked.parts[rank].indices for rank in collected] if asked is not None else None
        """The samples of each, if the call was made with a `RemoteBatch`."""
        self.sample_ids = asked.sample_ids if asked is not None else None
        """Of that batch."""

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
            EngineError: the ranks returned `Columns`, which `facts`, `notes` and `RemoteBatch.with_columns` are for.
        """
        self.wait(timeout_s)
        values = [unpack(value) for value in self._fetched()]
        if any(isinstance(value, Columns) for value in values):
            raise EngineError(f"{self}: returned columns, which are joined to a batch; ask for their facts or notes")
        collected: Any = values  # a T by the method's protocol
        if self._joined and self.parts is not None and _by_sample(values, self.parts):
            collected = in_order(concatenate(values), self.parts)
        elif self._joined:
            collected = concatenate(values)
        return collected  # type: ignore[no-any-return]

    def batch(self: Future[SampleBatch]) -> RemoteBatch:
        """Wait for all ranks; the samples that they made as one batch, whose tokens stay where they are.

        Raises as `result` does.
        """
        return RemoteBatch.of_results(self._summaries(), self.refs, self.nodes)

    def facts(self: Future[Columns]) -> dict[str, Tensor]:
        """Wait for all ranks; the facts of the `Columns` that they returned, in the order of the call's batch."""
        joined = joined_facts([summary.facts for summary in self._summaries()])
        assert self.parts is not None
        return {name: in_order(fact, self.parts) for name, fact in joined.items()}

    def notes(self: Future[Columns]) -> list[Any]:
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
        limit_s = self.call.ranks.call_timeout_s
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


def as_they_answer(futures: Sequence[Future[Any]]) -> Generator[int, None, None]:
    """Which of some calls has been answered, by its place, one after another; waits for each.

    Raises:
        RankError, RankUserError: a call failed; the group of every other that is unfinished is dead then, as it is
            when the caller does not go on to the last.
    """
    with ThreadPoolExecutor(len(futures), thread_name_prefix="wait") as threads:
        waiting = {threads.submit(future.wait): place for place, future in enumerate(futures)}
        try:
            for each in as_completed(waiting):
                each.result()
                yield waiting[each]
        finally:
            for future in futures:
                future.abandon()


def wait_together(*futures: Future[Any]) -> None:
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
