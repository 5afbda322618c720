"""The source of the rollouts of a run, and restarts of its engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.config.recipe import Recipe
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.errors.log import log
from hybridflow.roles.groups import RolloutGroup
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.engine_handles import DeviceLease
from hybridflow.rollout.episodes.episodes import EpisodePlan
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.source import RolloutSource
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.trainer.startup.role_startup import Roles
from hybridflow.trainer.startup.run_setup import Run
from hybridflow.trainer.weight_sync import NoEngines, WeightSync
from hybridflow.workers.future import Future


class EngineRestarts:
    """Restarts of a run's engines.

    Args:
        rollout: the engines.
        weights: brings them the actor's.
    """

    def __init__(self, rollout: RolloutGroup, weights: WeightSync) -> None:
        self._rollout, self._weights = rollout, weights
        self._starting: dict[int, Future[Any]] = {}

    def begin(self, engine: int, cause: str) -> None:
        """Start an engine again while the others and the models work.

        Args:
            engine: its number.
            cause: what it failed of.
        """
        log.warning(f"rollout engine {engine} is lost and is started again, the others continue: {cause}")
        self._weights.leave(engine)
        self._starting[engine] = self._rollout.engines([engine]).restart()

    def started(self, *, wait: bool = False) -> list[int]:
        """Engines that can generate again but for their weights, each reported once.

        Args:
            wait: for all that are started.

        Raises:
            EngineError: one could not be started.
        """
        engines = [engine for engine, future in self._starting.items() if wait or future.done()]
        for engine in engines:
            self._starting.pop(engine).result()
        return engines

    def give_weights(self, engine: int, version: int) -> None:
        """Bring an engine that has started to the version that all others serve.

        Raises:
            EngineError: it failed.
        """
        self._weights.rejoin(engine, version)
        log.info(f"rollout engine {engine} serves again, weights version {version}")


_LATER_S = 60.0


def rollout_source(
    recipe: Recipe, run: Run, roles: Roles, weights: WeightSync | NoEngines, order: PromptOrder
) -> RolloutSource:
    """The source of a run's rollouts, as the recipe has it."""
    functions, limits = recipe.functions, recipe.limits
    if roles.rollout is None:
        return RolloutSource(stream_plan(recipe, run.train, 0), functions, limits, run.train, order, None)
    restarts = None
    if recipe.rollout.engine_restarts:
        assert isinstance(weights, WeightSync)
        restarts = EngineRestarts(roles.rollout, weights)
    handles = roles.engine_handles(weights.before_generation)
    lease = roles.lease(recipe.rollout.lease_after_s)
    plan = stream_plan(recipe, run.train, len(handles.actors), lease)
    return RolloutSource(plan, functions, limits, run.train, order, handles, lease, restarts)


def stream_plan(recipe: Recipe, prompts: Prompts, engines: int, lease: DeviceLease | None = None) -> StreamPlan:
    """The plan of a recipe's rollouts.

    Args:
        recipe: of the run.
        prompts: of training.
        engines: their number.
        lease: engines that take requests only while a step waits, if there are any.
    """
    rollout, trainer, stream = recipe.rollout, recipe.trainer, recipe.rollout.stream
    # A rank says itself what hangs below it.
    common: dict[str, Any] = {
        "samples_per_prompt": rollout.samples_per_prompt,
        "requests_per_engine": rollout.engine.max_running_requests,
        "engines": engines,
        "engine_answers_s": rollout.engine.request_timeout_s + _LATER_S,
        "scorer_answers_s": recipe.limits.call_s,
        "sampling": rollout.sampling_table,
        "routes": recipe.has_routes,
    }
    if stream is None:
        limits = StreamLimits(trainer.prompts_per_step, trainer.max_staleness)
        return StreamPlan(limits, together=True, **common)
    bounds = None
    if stream.dynamic_batching:
        lengths = np.unique(PackedPrompts.of(prompts.tokens).lengths())
        longest = max(map(rollout.sampling_table.sequence_tokens, lengths.tolist()))
        bounds = RequestBounds(rollout.engine.max_running_requests, longest, stream.cache_target)
    limits = StreamLimits(
        trainer.prompts_per_step,
        trainer.max_staleness,
        extra=recipe.extra_groups,
        late=stream.late,
        queue=stream.queue,
        excess=stream.left_over,
    )
    environment = recipe.environment
    return StreamPlan(
        limits,
        bounds=bounds,
        episodes=None if environment is None else _episode_plan(environment),
        leased=lease.engines if lease is not None else (),
        restarts=stream.engine_restarts,
        scored_at_once=min((config.batches_at_once for config in recipe.functions.values()), default=1),
        **common,
    )


def _episode_plan(environment: EnvironmentConfig) -> EpisodePlan:
    discount = environment.turn_discount if environment.credit == "turn" else None
    return EpisodePlan(environment.max_turns, environment.max_turn_tokens, discount)
