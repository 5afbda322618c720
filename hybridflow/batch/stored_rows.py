"""Responses that have ended, as a rollout controller sees them: ids and lengths, and where their tokens are.

The tokens of samples are in object stores, batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.rollout.requests import EngineStats, Response
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.remote_batch import RemoteBatch


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Position of a sample among those that an engine has made.

    Args:
        packed: reference to the columns of these samples, a `Packed`.
        index: of the sample there.
        summary: reference to their per-sample columns, a `Summary`.
        node: Ray's id of their node.
    """

    packed: Any
    index: int
    summary: Any = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The end of a response.

    Args:
        sample, group, index: of its request.
        tokens: count of the response's.
        oldest: version of the oldest weights that drew a token of it.
        complete: True if it ended by itself, False if it was aborted.
        error: why the engine could not make it; None otherwise.
        turn: the response with its tokens, if it is a turn of an episode; None otherwise.
        row: the complete sample, once its reference is known; None of a turn, and of a response that was aborted.
    """

    sample: int
    group: int
    index: int
    tokens: int
    oldest: int
    complete: bool
    error: str | None = None
    turn: Response | None = None
    row: StoredRow | None = None

    @property
    def is_stored(self) -> bool:
        """True if the response is a complete sample, which its engine stores."""
        return self.complete and self.turn is None

    @property
    def stored_row(self) -> StoredRow:
        """The complete sample.

        Raises:
            ValueError: the response is none.
        """
        if self.row is None:
            raise ValueError(f"sample {self.sample} has ended without a row, expected the row of a complete sample")
        return self.row


@dataclass(frozen=True, slots=True)
class SampleEnds:
    """Responses that have ended at an engine.

    Args:
        samples: those that are stored first, in the order of their rows.
        stats: of the engine, if it reports them.
    """

    samples: Sequence[SampleEnd]
    stats: EngineStats | None = None


def gathered(rows: Sequence[StoredRow]) -> RemoteBatch:
    """Return the samples of these rows as one batch, in this order."""
    stored = {row.packed: row for row in rows}
    summaries = ray.get([row.summary for row in stored.values()])
    sizes = [len(summary.per_sample["sample_ids"]) for summary in summaries]
    firsts, first = {}, 0
    for ref, size in zip(stored, sizes, strict=True):
        firsts[ref], first = first, first + size
    batch = RemoteBatch.of_results(summaries, list(stored), [row.node for row in stored.values()])
    return batch.select([firsts[row.packed] + row.index for row in rows])
