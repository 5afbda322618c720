"""Samples of a stream where they lie: in object stores, batch by batch as they ended."""

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
        summary: reference to their facts, a `Summary`.
        packed: reference to their columns, a `Packed`.
        node: Ray's id of the node that they lie on.
    """

    summary: Any
    packed: Any
    node: str


@dataclass(frozen=True, slots=True)
class Row:
    """Where a sample lies: `rows` of an `Ended`, and its place in it."""

    rows: Any
    place: int


def gathered(rows: Sequence[Row]) -> RemoteBatch:
    """The samples at these places, each of which lies in a `StoredRows`, in this order."""
    stored: dict[Any, StoredRows] = {row.rows.packed: row.rows for row in rows}
    summaries = ray.get([each.summary for each in stored.values()])
    sizes = [len(summary.facts["sample_ids"]) for summary in summaries]
    firsts, first = {}, 0
    for ref, size in zip(stored, sizes, strict=True):
        firsts[ref], first = first, first + size
    whole = RemoteBatch.of_results(
        summaries, [each.packed for each in stored.values()], [each.node for each in stored.values()]
    )
    return whole.select([firsts[row.rows.packed] + row.place for row in rows])
