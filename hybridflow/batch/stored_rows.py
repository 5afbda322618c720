"""Samples of a stream in object stores, batch by batch as they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.remote_batch import RemoteBatch


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Samples that an engine has made.

    Args:
        summary: reference to their per-sample columns, a `Summary`.
        packed: reference to their columns, a `Packed`.
        node: Ray's id of their node.
    """

    summary: Any
    packed: Any
    node: str


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Position of a sample: the `StoredRows` that has it, and its index there."""

    rows: Any
    index: int


def gathered(rows: Sequence[StoredRow]) -> RemoteBatch:
    """Return the samples of these rows as one batch, in this order."""
    stored: dict[Any, StoredRows] = {row.rows.packed: row.rows for row in rows}
    summaries = ray.get([results.summary for results in stored.values()])
    sizes = [len(summary.per_sample["sample_ids"]) for summary in summaries]
    firsts, first = {}, 0
    for ref, size in zip(stored, sizes, strict=True):
        firsts[ref], first = first, first + size
    batch = RemoteBatch.of_results(
        summaries, [results.packed for results in stored.values()], [results.node for results in stored.values()]
    )
    return batch.select([firsts[row.rows.packed] + row.index for row in rows])
