"""The plan of a stream of rollouts: its limits, and how requests are submitted."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.rollout.config import Sampling, SamplingConfig
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.episodes.episodes import EpisodePlan
from hybridflow.rollout.ledger import StreamLimits

_SAMPLING = SamplingConfig()


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
    sampling: Sampling = _SAMPLING
    routes: bool = False
    episodes: EpisodePlan | None = None
    together: bool = False

    @property
    def one_ahead(self) -> bool:
        """True if the next step's prompts are submitted together once a step has its groups."""
        return self.together and self.limits.off_policy
