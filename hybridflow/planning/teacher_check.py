"""Whether a teacher's distributions can be compared with the student's, token by token."""

from __future__ import annotations

from pathlib import Path

from engine3d.errors import UserError
from engine3d.models import ModelSpec
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.config.recipe import Recipe


def check_teacher(recipe: Recipe, teacher: ModelSpec, directory: Path, actor: ModelSpec) -> None:
    """The teacher's vocabulary against the student's, and against the tokens that are compared.

    Args:
        directory: of the teacher.

    Raises:
        UserError: naming the setting.
    """
    if teacher.vocab_size != actor.vocab_size:
        raise UserError(
            f"teacher.path: {directory} has a vocab_size of {teacher.vocab_size} and the actor one of "
            f"{actor.vocab_size}; expected the same, since the most likely tokens of one are looked up in the other"
        )
    algorithm = recipe.algorithm
    assert isinstance(algorithm, DistillationSettings)
    if algorithm.divergence_in == "loss" and algorithm.top_k > actor.vocab_size:
        raise UserError(
            f"algorithm.top_k={algorithm.top_k} of a vocabulary of {actor.vocab_size} tokens, expected at most as many"
        )
