"""A batch whose tensors stay where they were made: the driver holds references, and facts, one figure a sample.

    batch = rollout.generate(prompts, ids).batch()             # tokens lie with the rollout workers
    batch = batch.with_columns(ref_logprobs=reference.logprobs(batch))
    batch = batch.with_facts(rewards=rewards)                  # (B,) figures that the driver has
    actor.update(batch)                                        # each rank fetches the rows of its part, and no others

A rank's result is kept in the object store of its node. Where ranks of the same node need rows of it, they read them
there; for ranks of another node the rows that they need are cut out first, so that only those travel.
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
from hybridflow.batch.sample_fields import SAMPLE
from hybridflow.batch.worker_output import Kept, Packed, Spans, Summary, joined_facts, pack
from hybridflow.errors.rank_failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

SampleCosts = Callable[[Sequence[int]], Sequence[float]]
"""Lengths of samples in tokens -> what each costs, in any unit."""

_CUTTING_THREADS = 4
_MOST_NODES = 1 << 14


def in_order(joined: Any, parts: Sequence[Sequence[int]]) -> Any:
    """Rows or items that came part by part, in the order of the batch that was dealt into these parts."""
    dealt = [sample for part in parts for sample in part]
    order = sorted(range(len(dealt)), key=dealt.__getitem__)
    return joined[torch.tensor(order)] if isinstance(joined, torch.Tensor) else [joined[index] for index in order]


@dataclass(frozen=True)
class Samples:
    """Some samples of a batch, which a protocol can split as it splits data: into parts of like cost.

    Args:
        indices: of the samples.
        costs: of each.
    """

    indices: tuple[int, ...]
    costs: tuple[float, ...]

    @classmethod
    def all_of(cls, batch: RemoteBatch, costs: SampleCosts) -> Samples:
        """Every sample of a batch."""
        return cls(tuple(range(len(batch))), tuple(costs(batch.lengths.tolist())))

    def split(self, parts: int) -> list[Samples]:
        """`parts` parts. Raises ValueError for an empty one."""
        if not 1 <= parts <= len(self.indices):
            raise ValueError(f"cannot deal {len(self.indices)} samples to {parts} ranks")
        return [
            Samples(tuple(self.indices[index] for index in part), tuple(self.costs[index] for index in part))
            for part in balanced_partition(self.costs, parts)
        ]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call with a batch was about: the ids of its samples, and the samples of each rank."""

    sample_ids: Tensor
    parts: list[Samples]


@dataclass(frozen=True, eq=False)
class _Stored:
    """One rank's result.

    Args:
        ref: of a `Packed`, or of the failure to make it.
        rows: (n,) int64: for each sample in it the sample of the batch, -1 for one that the batch does not have.
        lengths: (n, 2) int64: tokens of each, of the whole sequence and of the response.
        node: Ray's id of the node that it lies on.
        name: of the column, if it is to be called otherwise than its maker called it.
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
    """Samples of a stored result: where they lie in it (all of it, in its order, if `whole`), and which of a part they
    are."""

    ref: ray.ObjectRef
    spans: Spans
    samples: Tensor
    name: str
    whole: bool


@dataclass(frozen=True, eq=False)
class BatchPart(Kept):
    """Samples of a batch as they are sent to a rank, which fetches the rest."""

    size: int
    slices: tuple[_Slice, ...]
    facts: dict[str, Tensor]

    def unpack(self) -> SampleBatch | Failure:
        """Fetch the tokens of these samples.

        A fact that is named like a column of tokens holds for every counted token of its sample.

        Returns:
            The failure to make one of the columns in place of the batch, if there was one.

        Raises:
            ValueError: a column is not there for every sample.
        """
        values = ray.get([each.ref for each in self.slices])
        failure = next((value for value in values if isinstance(value, Failure)), None)
        if failure is not None:
            return failure
        found: dict[str, list[np.ndarray[Any, Any] | None]] = {}
        for each, packed in zip(self.slices, values, strict=True):
            for name, array in _named(packed, each.name).items():
                if name in self.facts:
                    continue
                pieces = found.setdefault(name, [None] * self.size)
                for sample, piece in zip(each.samples.tolist(), each.spans.cut(name, array), strict=True):
                    pieces[sample] = piece
        return self._with_facts({name: self._joined(name, pieces) for name, pieces in found.items()})

    def _joined(self, name: str, pieces: list[np.ndarray[Any, Any] | None]) -> Tensor:
        there = [piece for piece in pieces if piece is not None]
        if len(there) != self.size:
            raise ValueError(f"batch: column {name} is there for {len(there)} of {self.size} samples")
        dtype = SampleBatch.dtype_of(name)
        return torch.from_numpy(np.concatenate(there)).to(dtype) if there else torch.empty(0, dtype=dtype)

    def _with_facts(self, columns: dict[str, Tensor]) -> SampleBatch:
        for name, fact in self.facts.items():
            symbol, _ = COLUMNS.get(name, (None, None))
            if symbol == SAMPLE:
                columns[name] = fact.to(SampleBatch.dtype_of(name))
            elif symbol == RESPONSE:
                of_tokens = fact.to(SampleBatch.dtype_of(name)).repeat_interleave(self.facts["response_lengths"])
                columns[name] = of_tokens.where(columns["response_mask"], 0)
        return SampleBatch(**columns)


def _named(packed: Packed, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The columns; the only one under another name, if one is given. Raises ValueError for names of no column."""
    if not name:
        SampleBatch.check_names(packed.arrays)
        return packed.arrays
    if len(packed.arrays) != 1:
        raise ValueError(f"batch: columns {', '.join(packed.arrays) or 'none'} as {name}, expected one column")
    return {name: next(iter(packed.arrays.values()))}


class PendingColumns(Protocol):
    """A call with a batch whose results are columns of it, there or not yet."""

    refs: list[ray.ObjectRef]
    """Where the result of each part lies."""
    nodes: list[str]
    """Ray's id of the node of each."""
    parts: list[tuple[int, ...]] | None
    """The samples of each, if the call was made with a batch."""
    sample_ids: Tensor | None
    """Of that batch."""

    def wait(self) -> None:
        """Wait for all ranks. Raises what failed."""


class RemoteBatch:
    """B samples of which the driver holds facts and references. Never changed: every method returns a new one.

    Args:
        facts: name to (B,) tensor, the columns of `SampleBatch` with one figure a sample and `counted` among them.
        stored: where the columns of tokens lie.
        inputs: the calls that make columns which may not be there yet.
    """

    def __init__(
        self,
        facts: dict[str, Tensor],
        stored: Sequence[_Stored],
        inputs: Sequence[PendingColumns] = (),
    ) -> None:
        self.facts = facts
        self.inputs = tuple(inputs)
        self._stored = tuple(stored)

    def __len__(self) -> int:
        return len(self.facts["sample_ids"])

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample, of its prompt and its response."""
        return self.facts["prompt_lengths"] + self.facts["response_lengths"]

    @classmethod
    def of(cls, batch: SampleBatch) -> RemoteBatch:
        """A batch that this process holds, put into its node's object store."""
        packed, summary = pack(batch)
        assert summary is not None
        return cls.of_results([summary], [ray.put(packed)], [_here()])

    @classmethod
    def of_results(
        cls, summaries: Sequence[Summary], refs: Sequence[ray.ObjectRef], nodes: Sequence[str]
    ) -> RemoteBatch:
        """The batches that ranks made, one after another."""
        stored, first = [], 0
        for summary, ref, node in zip(summaries, refs, nodes, strict=True):
            size = len(summary.facts["sample_ids"])
            stored.append(_Stored(ref, torch.arange(first, first + size), _lengths(summary.facts), node))
            first += size
        return cls(joined_facts([summary.facts for summary in summaries]), stored)

    def with_facts(self, **facts: Tensor) -> RemoteBatch:
        """The batch with further figures, (B,) each. One named like a column of tokens holds for each of its tokens."""
        for name, fact in facts.items():
            if name not in COLUMNS:
                raise ValueError(f"batch: no column is called {name}, expected one of {', '.join(COLUMNS)}")
            if fact.shape != (len(self),):
                raise ValueError(f"batch: fact {name} has shape {tuple(fact.shape)}, expected ({len(self)},)")
        return RemoteBatch(self.facts | facts, self._stored, self.inputs)

    def with_columns(self, *columns: PendingColumns, **named: PendingColumns) -> RemoteBatch:
        """The batch with what calls on it return, which need not be there yet: `Columns`, or one column by its name.

        Raises:
            ValueError: a call was not made with this batch.
        """
        stored, inputs = list(self._stored), list(self.inputs)
        for name, future in [*(("", future) for future in columns), *named.items()]:
            parts, samples = future.parts, future.sample_ids
            if parts is None or samples is None or not torch.equal(samples, self.facts["sample_ids"]):
                raise ValueError(f"batch: {future} is no call with these {len(self)} samples in this order")
            if name in self.facts:
                raise ValueError(f"batch: {name} is a fact of it already, expected a new column")
            lengths = _lengths(self.facts)
            for ref, node, part in zip(future.refs, future.nodes, parts, strict=True):
                rows = torch.as_tensor(part)
                stored.append(_Stored(ref, rows, lengths[rows], node, name, added=True))
            inputs.append(future)
        return RemoteBatch(self.facts, stored, inputs)

    def as_generated(self) -> RemoteBatch:
        """The batch without the columns that calls with it made: a call with this one waits for none of them."""
        return RemoteBatch(self.facts, [each for each in self._stored if not each.added])

    def select(self, samples: Sequence[int] | Tensor) -> RemoteBatch:
        """Some samples, each at most once, in the given order. Nothing moves."""
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        place = torch.full((len(self) + 1,), -1)  # the last is that of rows without a sample
        place[chosen] = torch.arange(len(chosen))
        stored = [dataclasses.replace(each, rows=place[each.rows]) for each in self._stored]
        kept = [each for each in stored if bool((each.rows >= 0).any())]
        return RemoteBatch({name: fact[chosen] for name, fact in self.facts.items()}, kept, self.inputs)

    def split(self, parts: int) -> list[RemoteBatch]:
        """`parts` consecutive pieces in order; sizes differ by one at most. Raises ValueError for an empty piece."""
        if not 1 <= parts <= len(self):
            raise ValueError(f"batch: cannot split {len(self)} samples into {parts} non-empty parts")
        return [self.select(part) for part in even_ranges(len(self), parts)]

    @staticmethod
    def concatenate(batches: Sequence[RemoteBatch]) -> RemoteBatch:
        """One batch of all samples, in order. All must have the same facts."""
        first, names = batches[0], set(batches[0].facts)
        stored, inputs, offset = [], dict.fromkeys(first.inputs), 0
        for batch in batches:
            if set(batch.facts) != names:
                raise ValueError(f"batch: parts to join differ in {', '.join(sorted(names ^ set(batch.facts)))}")
            rows = [torch.where(each.rows >= 0, each.rows + offset, -1) for each in batch._stored]
            stored += [dataclasses.replace(each, rows=row) for each, row in zip(batch._stored, rows, strict=True)]
            inputs |= dict.fromkeys(batch.inputs)
            offset += len(batch)
        facts = joined_facts([batch.facts for batch in batches])
        return RemoteBatch(facts, stored, list(inputs))

    def deal(self, parts: Sequence[Sequence[int]], nodes: Sequence[frozenset[str]]) -> list[BatchPart]:
        """What ranks are sent for their parts.

        Args:
            parts: the samples of each part.
            nodes: of the ranks that get each part.
        """
        slices: list[list[_Slice]] = [[] for _ in parts]
        place, part_of = torch.full((2, len(self) + 1), -1)  # the last is that of rows without a sample
        for number, samples in enumerate(parts):
            rows = torch.as_tensor(samples, dtype=torch.int64)
            place[rows], part_of[rows] = torch.arange(len(rows)), number
        for stored in self._stored:
            wanted = part_of[stored.rows]
            for number in wanted[wanted >= 0].unique().tolist():
                taken = (wanted == number).nonzero()[:, 0]
                spans, whole = Spans.of(stored.lengths, taken), len(taken) == len(stored.rows)
                slices[number].append(_Slice(stored.ref, spans, place[stored.rows[taken]], stored.name, whole))
            self._cut_for_other_nodes(stored, slices, nodes)
        return [
            BatchPart(
                len(samples),
                tuple(each),
                {name: fact[torch.as_tensor(samples, dtype=torch.int64)] for name, fact in self.facts.items()},
            )
            for samples, each in zip(parts, slices, strict=True)
        ]

    @staticmethod
    def _cut_for_other_nodes(stored: _Stored, slices: list[list[_Slice]], nodes: Sequence[frozenset[str]]) -> None:
        """Let only the samples travel that are needed where they go; in place."""
        far = {
            number: each[-1].spans
            for number, each in enumerate(slices)
            if each and each[-1].ref is stored.ref and not each[-1].whole and nodes[number] != {stored.node}
        }
        if not far:
            return
        cutter = _cutter(stored.node)
        refs: Any = cutter.cut.options(num_returns=len(far)).remote(stored.ref, list(far.values()))
        for (number, spans), ref in zip(far.items(), refs if len(far) > 1 else [refs], strict=True):
            cut = Spans.of(spans.lengths, torch.arange(len(spans.rows)))
            slices[number][-1] = dataclasses.replace(slices[number][-1], ref=ref, spans=cut, whole=True)

    def fetch(self) -> SampleBatch:
        """All of it, in this process.

        Raises:
            RankError, RankUserError: a call failed that was to make a column.
        """
        for future in self.inputs:
            future.wait()
        [part] = self.deal([range(len(self))], [frozenset({_here()})])
        batch = part.unpack()
        if isinstance(batch, Failure):
            raise UserError(f"{batch.role} rank {batch.rank}, {batch.method}: {batch.error}")
        return batch


def _lengths(facts: dict[str, Tensor]) -> Tensor:
    """(n, 2): tokens of each sample, of the whole sequence and of the response."""
    responses = facts["response_lengths"]
    return torch.stack([facts["prompt_lengths"] + responses, responses], dim=1)


def _here() -> str:
    """Ray's id of this process's node."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


class _Cutter:
    """Cuts samples out of what lies on its node, for ranks of others. One a node, made when it is needed."""

    def cut(self, packed: Packed | Failure, parts: list[Spans]) -> Any:
        """The samples that each of some parts needs."""
        pieces = [packed if isinstance(packed, Failure) else packed.take(spans) for spans in parts]
        return pieces if len(pieces) > 1 else pieces[0]


def _cutter(node: str) -> Any:
    # Ray ends an actor to which nobody has a handle any more, and starting one takes seconds.
    return _cutter_of(ray.get_runtime_context().get_job_id(), node)


@functools.lru_cache(maxsize=_MOST_NODES)
def _cutter_of(_job: str, node: str) -> Any:
    options = {"num_cpus": 0, "max_concurrency": _CUTTING_THREADS, "name": f"cutter-{node}", "get_if_exists": True}
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Cutter).options(scheduling_strategy=there, **options).remote()
