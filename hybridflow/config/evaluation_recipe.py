"""Recipe of an evaluation without training: engines generate, rewards are given, and no model is trained."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import PrivateAttr

from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.recipe import Recipe
from hybridflow.rewards.config import RewardConfig
from hybridflow.roles.config import ModelRole


class EvaluationRecipe(Recipe):
    """The same settings; the roles are engines, those who call reward functions, and a reward model if it scores."""

    _measured: frozenset[str] = PrivateAttr(default=frozenset())

    @classmethod
    def of(cls, recipe: Recipe, measured: Collection[str]) -> EvaluationRecipe:
        """A recipe whose settings are checked.

        Args:
            recipe: with the sets.
            measured: names of those that are measured.
        """
        values = {name: getattr(recipe, name) for name in Recipe.model_fields}
        rollout = recipe.rollout
        # Of a training run the engines may begin with random weights, since the actor's come.
        arguments = {name: value for name, value in rollout.engine.server_args.items() if name != "load_format"}
        engine = rollout.engine.model_copy(
            update={"release_weights": False, "draft_tokens": 0, "server_args": arguments}
        )
        weights = rollout.weights.model_copy(update={"share": False, "rolling": False})
        stream = rollout.stream if recipe.environment is not None else None  # by which turns are requested
        if stream is not None:  # without what is of groups, or of engines that weights are sent to
            stream = stream.model_copy(update={"dynamic_batching": False, "engine_restarts": 0})
        values["rollout"] = rollout.model_copy(
            update={"engine": engine, "weights": weights, "stream": stream, "lease": False}
        )
        if recipe.reward_model is not None:  # next to which nothing else computes
            values["reward_model"] = recipe.reward_model.model_copy(update={"offload": False})
        made = cls.model_construct(recipe.model_fields_set, **values)
        made._measured = frozenset(measured)
        return made

    @property
    def trains(self) -> bool:
        return False

    @property
    def trained_roles(self) -> tuple[str, ...]:
        return ()

    @property
    def sets(self) -> dict[str, PlannedSet]:
        return {name: planned for name, planned in super().sets.items() if name in self._measured}

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def models(self) -> dict[str, ModelRole]:
        scored = any(planned.reward is None for planned in self.sets.values())
        return {"reward_model": self.reward_model} if scored and self.reward_model is not None else {}

    @property
    def teacher_engine(self) -> None:
        return None

    @property
    def functions(self) -> dict[str, RewardConfig]:
        return {}

    @property
    def all_functions(self) -> dict[str, RewardConfig]:
        return {planned.scorer: planned.reward for planned in self.sets.values() if planned.scorer and planned.reward}

    @property
    def device_maps(self) -> dict[str, str]:
        running = {"rollout", *self.models, *(("reward",) if self.all_functions else ())}
        running |= {"judge"} if self.asked_judge is not None else set()
        return {role: devices for role, devices in super().device_maps.items() if role in running}
