"""Plan of a stream of rollouts, its results for a step, and its state over a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import Response
from hybridflow.batch.stream_requests import SampleEnd, StoredRow
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.episodes import EpisodePlan
from hybridflow.rollout.ledger import Group, StreamLimits, Taken


@dataclass(frozen=True)
class StreamPlan:
    """Plan of a stream.

    Args:
        limits: of its groups.
        samples_per_prompt: responses in a group.
        requests_per_engine: most that are in flight at each engine.
        engines: how many there are.
        bounds: of the requests in flight at each engine, where they follow the use of its cache; always
            `requests_per_engine` if None.
        leased: engines that take requests only from `lease` to `reclaim`.
        restarts: how often a lost engine may be restarted.
        scored_at_once: batches of samples that each scorer may have at a time.
        engine_answers_s, scorer_answers_s: that a rank has to answer a call.
        sampling: distribution that tokens are drawn from.
        routes: True if samples have routes.
        episodes: limits of episodes; None if a sample is one turn.
        together: True if the prompts of a step are submitted together, to end together: a share to each engine.
    """

    limits: StreamLimits
    samples_per_prompt: int
    requests_per_engine: int
    engines: int
    bounds: RequestBounds | None = None
    leased: tuple[int, ...] = ()
    restarts: int = 0
    scored_at_once: int = 1
    engine_answers_s: float = 660.0
    scorer_answers_s: float = 1800.0
    sampling: Sampling | None = None
    routes: bool = False
    episodes: EpisodePlan | None = None
    together: bool = False

    @property
    def one_ahead(self) -> bool:
        """True if the next step's prompts are submitted together once a step has its groups."""
        return self.together and self.limits.max_staleness > 0


@dataclass(frozen=True)
class GroupRows:
    """A complete group: the end of each sample in order, its row, and its score if there are any."""

    group: Group
    ends: tuple[SampleEnd, ...]
    rows: tuple[StoredRow, ...]
    scores: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StepRows:
    """Groups and metrics of a step.

    Args:
        groups: in the order of their draws.
        taken: of them, from the ledger.
        metrics: of the stream since the last step, by name.
        busy: engine, begin and end of the times in which one had requests in flight, by the stream's clock.
        events: decisions since the last step, in order; see `StreamEvents`.
    """

    groups: tuple[GroupRows, ...]
    taken: Taken
    metrics: dict[str, float]
    busy: tuple[tuple[int, float, float], ...] = ()
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class OtherRows:
    """Responses to other prompts than those of groups.

    Args:
        rows: row of each sample, in the order of the requests.
        busy: engine, begin and end, as in `StepRows`.
        scores: of each sample that is an episode; empty of others.
    """

    rows: tuple[StoredRow, ...]
    busy: tuple[tuple[int, float, float], ...]
    scores: tuple[SampleScore, ...] = ()


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
    ended: tuple[tuple[SampleEnd, StoredRow], ...]
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
