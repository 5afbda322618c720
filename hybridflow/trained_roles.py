"""The roles that a recipe trains, and whether a checkpoint has the state of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine3d.checkpoint.manifest import RoleFacts
from engine3d.errors import UserError
from hybridflow.config import Recipe

ACTOR, CRITIC, COST_CRITIC = "actor", "critic", "cost_critic"


def trained_roles(recipe: Recipe) -> tuple[str, ...]:
    """The roles whose state a checkpoint holds: the policy, and the critics that the algorithm needs."""
    critic = (CRITIC,) if recipe.algorithm.needs_critic else ()
    cost_critic = (COST_CRITIC,) if recipe.algorithm.needs_cost else ()
    return (ACTOR, *critic, *cost_critic)


def check_saved_roles(recipe: Recipe, directory: Path, saved: Mapping[str, RoleFacts]) -> None:
    """Whether every role that the recipe trains can go on with what was saved.

    Args:
        recipe: of the run that is to be resumed.
        directory: of the checkpoint.
        saved: the roles that it holds.

    Raises:
        UserError: a role is missing, or has a value head in place of logits or the other way round.
    """
    trained = trained_roles(recipe)
    if missing := [role for role in trained if role not in saved]:
        raise UserError(
            f"resume: {directory} has no {' and no '.join(missing)}, only {', '.join(saved) or 'no role at all'}; "
            f"algorithm.name={recipe.algorithm.name} trains {', '.join(trained)}"
        )
    for role in trained:
        if saved[role].value_head != (role != ACTOR):
            found, expected = ("a value head", "logits") if role == ACTOR else ("logits", "a value head")
            raise UserError(f"resume: {directory}: the {role} ends in {found}, expected {expected}")
