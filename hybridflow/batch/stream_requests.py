"""A rollout controller's view of engines and samples: ids and lengths; of tokens only prefixes to continue from.

The tokens of samples that have ended are in object stores, batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import EngineError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import EngineStats, Response
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.remote_batch import RemoteBatch


class EngineLostError(EngineError):
    """An engine failed and can be restarted."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A response to make.

    Args:
        sample: its id, unique over the run.
        group: number of the draw.
        index: of the sample in its group.
        prompt: index of the prompt.
        tokens: count of the prompt's, and of the prefix's.
        prefix: of the response, which continues from it.
        limit: most tokens of the response, the prefix included; that of its prompt if None.
        engine: number of the engine that has the prefix in its cache; None if none has.
        turn_start: as of `Request`.
        context: token ids before the response, in place of those of the prompt; None with these.
        sampling: of the response, in place of that of training; None with that.
    """

    sample: int
    group: int
    index: int
    prompt: int
    tokens: int
    prefix: Response | None = None
    limit: int | None = None
    engine: int | None = None
    turn_start: int = 0
    context: Sequence[int] | None = None
    sampling: SamplingConfig | None = None


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
