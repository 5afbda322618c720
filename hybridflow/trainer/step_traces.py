"""What a step's rollout and updates spend their time on, where `trainer.profile` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config.run import TrainerConfig
from hybridflow.errors.log import log
from hybridflow.trainer.role_startup import Roles
from hybridflow.trainer.run_setup import Run


def trace_updates(trainer: TrainerConfig, number: int, learning: Sequence[str], run: Run, roles: Roles) -> None:
    """Have the next update of each role traced, if `profile` names the step of this number.

    Args:
        trainer: of the recipe.
        number: of the step.
        learning: the roles.
        run: whose directory gets the traces.
        roles: of the run.
    """
    if (settings := trainer.profile_of(number)) is None:
        return
    for role in learning:
        path = run.trace_path(number, role)
        roles.learning[role].trace_next_update(path, micro_batches=settings.micro_batches).result()


def trace_rollout(trainer: TrainerConfig, number: int, run: Run, roles: Roles) -> None:
    """Have the first engine trace what it does next, if `profile` wants that of the step of this number."""
    settings = trainer.profile_of(number)
    if settings is None or not settings.rollout_steps or roles.rollout is None:
        return
    directory = run.rollout_trace_directory(number)
    for why in filter(None, roles.rollout.trace(directory, steps=settings.rollout_steps).result()):
        log.warning(f"step {number}: no trace of the rollout: {why}")
