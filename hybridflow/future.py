"""The result of a call on a group, there or not yet."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from engine3d.errors import EngineError
from hybridflow.columns import Columns, Summary, joined_facts, unpack
from hybridflow.failures import GRACE_S, most_telling_error, wait_for_statuses
from hybridflow.protocols import Protocol, Shards, concatenate
from hybridflow.remote_batch import Asked, RemoteBatch, in_order

if TYPE_CHECKING:
    from hybridflow.worker_group import WorkerGroup

_LOOK_S = 0.2  # at what has happened already


class Future:
    """The result of a call on a group, once all ranks have answered."""

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        protocol: Protocol,
        answers: Sequence[tuple[ray.ObjectRef, ray.ObjectRef]],
        inputs: Sequence[Future] = (),
        asked: Asked | None = None,
    ) -> None:
        self._group, self._method, self._protocol, self._inputs = group, method, protocol, inputs
        self._answered = False
        self._statuses = [status for status, _ in answers]
        collected = protocol.collect(group.grid)
        self._told = [answers[rank][0] for rank in collected]
        self.refs = [answers[rank][1] for rank in collected]
        """The result of each collected rank, where it lies."""
        self.nodes = [group.nodes[rank] for rank in collected]
        """Ray's id of the node of each."""
        self.parts = [asked.parts[rank].indices for rank in collected] if asked is not None else None
        """The samples of each, if the call was made with a `RemoteBatch`."""
        self.sample_ids = asked.sample_ids if asked is not None else None
        """Of that batch."""

    def __str__(self) -> str:
        return f"{self._group.role}.{self._method}"

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for all ranks and return what the protocol makes of their results.

        Rows that belong to the samples of a `RemoteBatch` come in their order.

        Args:
            timeout_s: how long to wait, in seconds; the group's own limit if None.

        Raises:
            RankError: a rank failed, died, or did not answer in time; the group is dead.
            RankUserError: a rank refused its input; the group is dead.
            EngineError: the ranks returned `Columns`, which `facts`, `notes` and `RemoteBatch.with_columns` are for.
        """
        self.wait(timeout_s)
        values = [unpack(value) for value in ray.get(self.refs)]
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
        summaries: list[Summary | None] = ray.get(self._told)
        found = [summary for summary in summaries if summary is not None]
        if len(found) < len(summaries):
            raise EngineError(f"{self}: returned neither a batch nor columns, expected one of them")
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks and leave the results where they are. Raises as `result` does."""
        if not self._answered:
            self._group._await(self._method, self._statuses, timeout_s, self._inputs)
            self._answered = True

    def raise_cause(self, waited_s: float | None) -> None:
        """Raise, as the cause of what a later call met, if a rank has failed.

        Args:
            waited_s: how long the later call has waited for an answer that did not come: a rank of this call that has
                not answered either is then the cause.
        """
        group = self._group
        if self._answered or not group._actors:
            return
        failures, silent = wait_for_statuses(group.role, self._method, self._statuses, group._actors, _LOOK_S)
        if failures or (silent and waited_s is not None):
            group._fail(self._method, failures, silent, waited_s or 0.0, self._inputs)

    def abandon(self) -> None:
        """Kill the group if it has not answered."""
        if not self._answered:
            self._group.kill()

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        ready, _ = ray.wait(self._statuses, num_returns=len(self._statuses), timeout=0)
        return len(ready) == len(self._statuses)

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
