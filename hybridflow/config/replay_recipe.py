"""A run's recipe where its steps are made again from stored samples: nothing generates, and nothing is scored."""

from __future__ import annotations

from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.recipe import Recipe
from hybridflow.rewards.config import RewardConfig
from hybridflow.roles.config import ModelRole, ScoringModel

_SCORING = ("reward_model", "cost_model")
_OF_SAMPLES = ("rollout", "reward", *_SCORING)
"""Roles by which samples came about that the store has."""


class ReplayRecipe(Recipe):
    """Return the same settings with the trained roles, and the roles whose outputs for samples are trained on."""

    @classmethod
    def of(cls, recipe: Recipe) -> ReplayRecipe:
        """A recipe that has been checked."""
        values = {name: getattr(recipe, name) for name in Recipe.model_fields}
        return cls.model_construct(recipe.model_fields_set, **values)

    @property
    def starts_engines(self) -> bool:
        return False

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def models(self) -> dict[str, ModelRole]:
        return {role: model for role, model in super().models.items() if role not in _SCORING}

    @property
    def functions(self) -> dict[str, RewardConfig]:
        return {}

    @property
    def scoring(self) -> dict[str, ScoringModel]:
        return {}

    @property
    def sets(self) -> dict[str, PlannedSet]:
        return {}

    @property
    def asked_judge(self) -> None:
        return None

    @property
    def device_maps(self) -> dict[str, str]:
        return {role: devices for role, devices in super().device_maps.items() if role not in _OF_SAMPLES}
