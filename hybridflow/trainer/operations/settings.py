"""Settings of a step's operations."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.recipe import Recipe
from hybridflow.config.run import TrainerConfig
from hybridflow.rollout.config import RolloutRole


@dataclass(frozen=True)
class StepSettings:
    """Settings of the operations of a step.

    Args:
        seed: of the run.
        trainer: sizes of a step, its mini-batches and what is traced.
        rollout: sampling and samples per prompt.
        passing: least reward of a response that passes, for a curriculum by difficulty; None without one.
        texts: samples of a step that are written as texts, and most characters of each.
        stores_samples: True if a step's samples are stored.
        records_routes: True if updates give tokens to the experts of the pass that computes old log-probs.
        reference_is_base: True if the reference, where there is one, is the actor without its adapters.
    """

    seed: int
    trainer: TrainerConfig
    rollout: RolloutRole
    passing: float | None
    texts: tuple[int, int]
    stores_samples: bool
    records_routes: bool
    reference_is_base: bool

    @classmethod
    def of(cls, recipe: Recipe) -> StepSettings:
        """The settings that a recipe has."""
        files, shown = recipe.data.files, recipe.metrics
        return cls(
            recipe.seed,
            recipe.trainer,
            recipe.rollout,
            files.difficulty.passing if files is not None and files.difficulty is not None else None,
            (shown.samples_per_step, shown.sample_characters),
            recipe.samples.store,
            recipe.train.routing_replay == "update",
            recipe.reference_is_base,
        )
