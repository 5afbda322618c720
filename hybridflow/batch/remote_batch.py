"""A batch whose tensors stay where they were made: the driver holds references and per-sample columns.

    batch = responses.batch()                                  # tokens stay with the rollout workers
    batch = batch.with_columns(ref_logprobs=reference.logprobs(batch))
    batch = batch.with_per_sample(rewards=rewards)             # (B,) values of the driver
    actor.update(batch)                                        # each rank fetches the rows of its shard alone

A rank's result is kept in the object store of its node. Ranks of the same node read rows of it there. For ranks of
another node the rows that they need are copied out first, so that only those travel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine3d.errors import UserError
from engine3d.startup.lazy_imports import torch
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.load_balance import balanced_partition, even_ranges
from hybridflow.batch.sample_batch import COLUMNS, RESPONSE, SampleBatch
from hybridflow.batch.sample_fields import ROUTES, SAMPLE
from hybridflow.batch.worker_output import (
    ROUTE_BYTES,
    Kept,
    Packed,
    Spans,
    Summary,
    joined_per_sample,
    pack,
    send_tensors_as_arrays,
)
from hybridflow.errors.rank_failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

SampleCosts = Callable[[Sequence[int]], Sequence[float]]
"""Lengths of samples in tokens -> what each costs, in any unit."""

_CUTTING_THREADS = 4
_MOST_NODES = 1 << 14


def in_order(joined: Any, shards: Sequence[Sequence[int]]) -> Any:
    """Return rows or items that came shard by shard in the order of the batch."""
    indices = [sample for shard in shards for sample in shard]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return joined[torch.tensor(order)] if isinstance(joined, torch.Tensor) else [joined[index] for index in order]


@dataclass(frozen=True)
class SampleIndices:
    """Indices of samples of a batch. A protocol splits them as it splits data, into shards of like cost.

    Args:
        indices: of the samples.
        costs: of each.
    """

    indices: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def all_of(cls, batch: RemoteBatch, costs: SampleCosts) -> SampleIndices:
        """Return every sample of a batch."""
        return cls(tuple(range(len(batch))), tuple(costs(batch.lengths.tolist())))

    def split(self, shards: int) -> list[SampleIndices]:
        """Split into `shards` shards. Raises ValueError for an empty one."""
        if not 1 <= shards <= len(self.indices):
            raise ValueError(f"cannot shard {len(self.indices)} samples over {shards} ranks")
        return [
            SampleIndices(tuple(self.indices[index] for index in shard), tuple(self.costs[index] for index in shard))
            for shard in balanced_partition(self.costs, shards)
        ]


@dataclass(frozen=True, eq=False)
class SampleAssignment:
    """Ids of a call's samples, and the samples of each rank."""

    sample_ids: Tensor
    shards: list[SampleIndices]


@dataclass(frozen=True, eq=False)
class _Stored:
    """One rank's result.

    Args:
        ref: of a `Packed`, or of the failure to make it.
        rows: (n,) int64: for each sample in it the sample of the batch, -1 for one that the batch does not have.
        lengths: (n, 2) int64: tokens of each, of the whole sequence and of the response.
        node: Ray's id of its node.
        name: of the column, if it is renamed.
        added: made by a call with the batch.
    """

    ref: ray.ObjectRef
    rows: Tensor
    lengths: Tensor
    node: str
    name: str = ""
    added: bool = False


@dataclass(frozen=True, eq=False)
class _Slice:
    """Samples of a stored result: their spans in it (all of it, in its order, if `complete`), and their indices in a
    shard."""

    ref: ray.ObjectRef
    spans: Spans
    samples: Tensor
    name: str
    complete: bool


@dataclass(frozen=True, eq=False)
class BatchShard(Kept):
    """Samples of a batch as references, sent to a rank, which fetches the tokens. `without`: columns that it does not
    need."""

    size: int
    slices: tuple[_Slice, ...]
    per_sample: dict[str, Tensor]
    without: tuple[str, ...] = ()

    def unpack(self) -> SampleBatch | Failure:
        """Fetch the tokens of these samples. Their routes stay in the node's object store (`stored_routes`).

        A per-sample column that is named like a column of tokens holds for every loss token of its sample.

        Returns:
            The failure to make one of the columns in place of the batch, if there was one.

        Raises:
            ValueError: a column is not there for every sample.
        """
        values = ray.get([slice_.ref for slice_ in self.slices])
        failure = next((value for value in values if isinstance(value, Failure)), None)
        if failure is not None:
            return failure
        columns: dict[str, list[np.ndarray[Any, Any] | None]] = {}
        for slice_, packed in zip(self.slices, values, strict=True):
            for name, array in _named(packed, slice_.name).items():
                if name in self.per_sample or name in self.without:
                    continue
                rows = columns.setdefault(name, [None] * self.size)
                for sample, row in zip(slice_.samples.tolist(), slice_.spans.cut(name, array), strict=True):
                    rows[sample] = row
        complete = {name: self._complete(name, rows) for name, rows in columns.items()}
        routes = complete.pop(ROUTES, None)
        batch = self._with_per_sample({name: self._joined(name, rows) for name, rows in complete.items()})
        if routes is None:
            return batch
        from engine3d.models.experts.routes import TokenRoutes  # imports torch

        return dataclasses.replace(batch, stored_routes=TokenRoutes(tuple(routes)))

    def _complete(self, name: str, rows: list[np.ndarray[Any, Any] | None]) -> list[np.ndarray[Any, Any]]:
        present = [row for row in rows if row is not None]
        if len(present) != self.size:
            raise ValueError(f"batch: column {name} is there for {len(present)} of {self.size} samples")
        return present

    def _joined(self, name: str, present: list[np.ndarray[Any, Any]]) -> Tensor:
        dtypes = SampleBatch.dtypes_of(name)
        if not present:
            return torch.empty(0, dtype=dtypes[0])
        column = torch.from_numpy(np.concatenate(present))
        return column if column.dtype in dtypes else column.to(dtypes[0])

    def _with_per_sample(self, columns: dict[str, Tensor]) -> SampleBatch:
        for name, values in self.per_sample.items():
            symbol, _ = COLUMNS.get(name, (None, None))
            if symbol == SAMPLE:
                columns[name] = values.to(SampleBatch.dtypes_of(name)[0])
            elif symbol == RESPONSE:
                of_tokens = values.to(SampleBatch.dtypes_of(name)[0]).repeat_interleave(
                    self.per_sample["response_lengths"]
                )
                columns[name] = of_tokens.where(columns["response_mask"], 0)
        return SampleBatch(**columns, stored_routes=None)


def _named(packed: Packed, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns, the only one as `name` if that is given. Raises ValueError for names of no column."""
    if not name:
        SampleBatch.check_names(packed.arrays)
        return packed.arrays
    if len(packed.arrays) != 1:
        raise ValueError(f"batch: columns {', '.join(packed.arrays) or 'none'} as {name}, expected one column")
    return {name: next(iter(packed.arrays.values()))}


class PendingColumns(Protocol):
    """A call with a batch whose results are columns of it, there or not yet."""

    refs: list[ray.ObjectRef]
    """Reference to the result of each shard."""
    nodes: list[str]
    """Ray's id of the node of each shard's result."""
    shard_indices: list[tuple[int, ...]] | None
    """Samples of each shard, if the call was made with a batch."""
    sample_ids: Tensor | None
    """Sample ids of that batch."""

    def wait(self) -> None:
        """Wait for all ranks. Raises what failed."""


class RemoteBatch:
    """B samples of which the driver holds per-sample columns and references. Immutable: every method returns a new one.

    Args:
        per_sample: name to (B,) tensor, the columns of `SampleBatch` with one value a sample, and `loss_tokens`.
        stored: references to the columns of tokens.
        inputs: the calls that make columns, pending or not.
    """

    def __init__(
        self,
        per_sample: dict[str, Tensor],
        stored: Sequence[_Stored],
        inputs: Sequence[PendingColumns] = (),
    ) -> None:
        self.per_sample = per_sample
        self.inputs = tuple(inputs)
        self._stored = tuple(stored)

    def __len__(self) -> int:
        return len(self.per_sample["sample_ids"])

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample, of its prompt and its response."""
        return self.per_sample["prompt_lengths"] + self.per_sample["response_lengths"]

    @classmethod
    def of(cls, batch: SampleBatch) -> RemoteBatch:
        """Put a local batch into this node's object store."""
        packed, summary = pack(batch)
        assert summary is not None
        return cls.of_results([summary], [ray.put(packed)], [_here()])

    @classmethod
    def of_results(
        cls, summaries: Sequence[Summary], refs: Sequence[ray.ObjectRef], nodes: Sequence[str]
    ) -> RemoteBatch:
        """Join the batches that ranks made."""
        stored, first = [], 0
        for summary, ref, node in zip(summaries, refs, nodes, strict=True):
            size = len(summary.per_sample["sample_ids"])
            stored.append(_Stored(ref, torch.arange(first, first + size), _lengths(summary.per_sample), node))
            first += size
        return cls(joined_per_sample([summary.per_sample for summary in summaries]), stored)

    def with_per_sample(self, **columns: Tensor) -> RemoteBatch:
        """Add per-sample columns, (B,) each. One named like a column of tokens holds for each token of its sample."""
        for name, column in columns.items():
            if name not in COLUMNS:
                raise ValueError(f"batch: no column is called {name}, expected one of {', '.join(COLUMNS)}")
            if column.shape != (len(self),):
                raise ValueError(
                    f"batch: per-sample column {name} has shape {tuple(column.shape)}, expected ({len(self)},)"
                )
        return RemoteBatch(self.per_sample | columns, self._stored, self.inputs)

    def with_columns(self, *columns: PendingColumns, **named: PendingColumns) -> RemoteBatch:
        """Add the results of calls with this batch, pending or not: `Columns`, or one column by its name.

        Raises:
            ValueError: a call was not made with this batch.
        """
        stored, inputs = list(self._stored), list(self.inputs)
        for name, future in [*(("", future) for future in columns), *named.items()]:
            shards, samples = future.shard_indices, future.sample_ids
            if shards is None or samples is None or not torch.equal(samples, self.per_sample["sample_ids"]):
                raise ValueError(f"batch: {future} is no call with these {len(self)} samples in this order")
            if name in self.per_sample:
                raise ValueError(f"batch: {name} is a per-sample column of it already, expected a new column")
            lengths = _lengths(self.per_sample)
            for ref, node, shard in zip(future.refs, future.nodes, shards, strict=True):
                rows = torch.as_tensor(shard)
                stored.append(_Stored(ref, rows, lengths[rows], node, name, added=True))
            inputs.append(future)
        return RemoteBatch(self.per_sample, stored, inputs)

    def as_generated(self) -> RemoteBatch:
        """Drop the columns that calls with the batch made, so that a call with it waits for none of them."""
        return RemoteBatch(self.per_sample, [stored for stored in self._stored if not stored.added])

    def select(self, samples: Sequence[int] | Tensor) -> RemoteBatch:
        """Select samples, each at most once, in the given order. Nothing moves."""
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        row_of = torch.full((len(self) + 1,), -1)  # the last is that of rows without a sample
        row_of[chosen] = torch.arange(len(chosen))
        stored = [dataclasses.replace(result, rows=row_of[result.rows]) for result in self._stored]
        kept = [result for result in stored if bool((result.rows >= 0).any())]
        return RemoteBatch({name: column[chosen] for name, column in self.per_sample.items()}, kept, self.inputs)

    def split(self, shards: int) -> list[RemoteBatch]:
        """Split into consecutive shards, whose sizes differ by one at most. Raises ValueError for an empty one."""
        if not 1 <= shards <= len(self):
            raise ValueError(f"batch: cannot split {len(self)} samples into {shards} non-empty shards")
        return [self.select(shard) for shard in even_ranges(len(self), shards)]

    @staticmethod
    def concatenate(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """Join batches in order. All must have the same per-sample columns."""
        first, names = batches[0], set(batches[0].per_sample)
        stored, inputs, offset = [], dict.fromkeys(first.inputs), 0
        for batch in batches:
            if set(batch.per_sample) != names:
                raise ValueError(f"batch: batches to join differ in {', '.join(sorted(names ^ set(batch.per_sample)))}")
            rows = [torch.where(result.rows >= 0, result.rows + offset, -1) for result in batch._stored]
            stored += [dataclasses.replace(result, rows=row) for result, row in zip(batch._stored, rows, strict=True)]
            inputs |= dict.fromkeys(batch.inputs)
            offset += len(batch)
        per_sample = joined_per_sample([batch.per_sample for batch in batches])
        return RemoteBatch(per_sample, stored, list(inputs))

    def shard(
        self, shards: Sequence[Sequence[int]], nodes: Sequence[frozenset[str]], *, routes: bool = True
    ) -> list[BatchShard]:
        """Shard the batch for ranks, which fetch the tokens of their samples.

        Args:
            shards: the samples of each shard.
            nodes: of the ranks that get each shard.
            routes: true if they need the column `routes`, where there is one.
        """
        send_tensors_as_arrays()
        without = () if routes else (ROUTES,)
        # A call's own routes are read where its ranks are. Only those of engines are worth a copy without them.
        cut = without if ROUTE_BYTES in self.per_sample else ()
        slices: list[list[_Slice]] = [[] for _ in shards]
        index_of, shard_of = torch.full((2, len(self) + 1), -1)  # the last is that of rows without a sample
        for number, samples in enumerate(shards):
            rows = torch.as_tensor(samples, dtype=torch.int64)
            index_of[rows], shard_of[rows] = torch.arange(len(rows)), number
        for stored in self._stored:
            shard_of_row = shard_of[stored.rows]
            for number in shard_of_row[shard_of_row >= 0].unique().tolist():
                taken = (shard_of_row == number).nonzero()[:, 0]
                spans, complete = Spans.of(stored.lengths, taken), len(taken) == len(stored.rows)
                slices[number].append(_Slice(stored.ref, spans, index_of[stored.rows[taken]], stored.name, complete))
            self._cut_for_other_nodes(stored, slices, nodes, cut)
        return [
            BatchShard(
                len(samples),
                tuple(shard_slices),
                {name: column[torch.as_tensor(samples, dtype=torch.int64)] for name, column in self.per_sample.items()},
                without,
            )
            for samples, shard_slices in zip(shards, slices, strict=True)
        ]

    @staticmethod
    def _cut_for_other_nodes(
        stored: _Stored, slices: list[list[_Slice]], nodes: Sequence[frozenset[str]], without: tuple[str, ...]
    ) -> None:
        """Replace slices on other nodes by copies of what they need alone, in place, so that only that travels."""
        far = {
            number: shard_slices[-1].spans
            for number, shard_slices in enumerate(slices)
            if shard_slices
            and shard_slices[-1].ref is stored.ref
            and not (shard_slices[-1].complete and not without)
            and nodes[number] != {stored.node}
        }
        if not far:
            return
        cutter = _cutter(stored.node)
        refs: Any = cutter.cut.options(num_returns=len(far)).remote(stored.ref, list(far.values()), without)
        for (number, spans), ref in zip(far.items(), refs if len(far) > 1 else [refs], strict=True):
            cut = Spans.of(spans.lengths, torch.arange(len(spans.rows)))
            slices[number][-1] = dataclasses.replace(slices[number][-1], ref=ref, spans=cut, complete=True)

    def fetch(self) -> SampleBatch:
        """Fetch all of it into this process.

        Raises:
            RankError, RankUserError: a call failed that was to make a column.
        """
        for future in self.inputs:
            future.wait()
        [batch_shard] = self.shard([range(len(self))], [frozenset({_here()})])
        batch = batch_shard.unpack()
        if isinstance(batch, Failure):
            raise UserError(f"{batch.role} rank {batch.rank}, {batch.method}: {batch.error}")
        return batch.with_routes()


def _lengths(per_sample: dict[str, Tensor]) -> Tensor:
    """Return (n, 2): tokens of each sample, of the whole sequence and of the response."""
    responses = per_sample["response_lengths"]
    return torch.stack([per_sample["prompt_lengths"] + responses, responses], dim=1)


def _here() -> str:
    """Return Ray's id of this process's node."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


class _Cutter:
    """Actor that takes samples out of results on its node, for ranks on other nodes. One a node, made when needed."""

    def cut(self, packed: Packed | Failure, shards: list[Spans], without: tuple[str, ...]) -> Any:
        """Take the samples of each shard, and leave columns out."""
        results = [packed if isinstance(packed, Failure) else packed.take(spans, without) for spans in shards]
        return results if len(results) > 1 else results[0]


def _cutter(node: str) -> Any:
    # Ray ends an actor to which nobody has a handle any more, and starting one takes seconds.
    return _cutter_of(ray.get_runtime_context().get_job_id(), node)


@functools.lru_cache(maxsize=_MOST_NODES)
def _cutter_of(_job: str, node: str) -> Any:
    options = {"num_cpus": 0, "max_concurrency": _CUTTING_THREADS, "name": f"cutter-{node}", "get_if_exists": True}
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Cutter).options(scheduling_strategy=there, **options).remote()
