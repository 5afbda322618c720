"""What a stream of rollouts is to make, what it gives to a step, and what it is over a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import Response
from hybridflow.batch.stored_rows import Row
from hybridflow.batch.stream_requests import SampleEnd
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.ledger import Group, StreamLimits, Taken


@dataclass(frozen=True)
class StreamPlan:
    """What a stream is to make.

    Args:
        limits: of its groups.
        samples_per_prompt: responses in a group.
        requests_per_engine: most that are in flight at each engine.
        engines: how many there are.
        bounds: of the requests in flight at each engine, where they follow the room in its cache; as many as there may
            be are in flight if None.
        lent: engines that take requests only from `lend` to `withdraw`.
        restarts: how often an engine may be lost, and started again.
        scored_at_once: batches of samples that each scorer may have at a time.
        engine_answers_s, scorer_answers_s: that a rank has to answer a call.
        sampling: distribution that tokens are drawn from.
    """

    limits: StreamLimits
    samples_per_prompt: int
    requests_per_engine: int
    engines: int
    bounds: RequestBounds | None = None
    lent: tuple[int, ...] = ()
    restarts: int = 0
    scored_at_once: int = 1
    engine_answers_s: float = 660.0
    scorer_answers_s: float = 1800.0
    sampling: Sampling | None = None


@dataclass(frozen=True)
class GroupRows:
    """A complete group: the end of each sample in order, its row, and its score if there are any."""

    group: Group
    ends: tuple[SampleEnd, ...]
    rows: tuple[Row, ...]
    scores: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StepRows:
    """What a step learns from.

    Args:
        groups: in the order of their draws.
        taken: what the ledger says of them.
        figures: of the stream since the last step, by metric name.
        busy: engine, begin and end of the times in which one had requests in flight, by the stream's clock.
        events: what was decided since the last step, in order; see `StreamEvents`.
    """

    groups: tuple[GroupRows, ...]
    taken: Taken
    figures: dict[str, float]
    busy: tuple[tuple[int, float, float], ...] = ()
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class GroupState:
    """A group in flight, or complete.

    Args:
        number: of its draw.
        first_sample: id of its first sample; the others follow.
        ended: samples that have ended, and their rows.
        prefixes: tokens of each other sample, by its index in the group; None of one without any.
        scores: of the samples that have ended and were scored, by index in the group.
    """

    number: int
    first_sample: int
    ended: tuple[tuple[SampleEnd, Row], ...]
    prefixes: dict[int, Response | None]
    scores: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamState:
    """All groups in flight.

    Args:
        ledger: `Ledger.state()`.
        samples_drawn: ids of samples that were given out.
        groups: in flight or complete.
    """

    ledger: dict[str, Any]
    samples_drawn: int
    groups: tuple[GroupState, ...]
