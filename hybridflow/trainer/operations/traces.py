"""Traces of a step's rollout and updates, where `trainer.profile` asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.config.run import ProfileConfig
from hybridflow.errors.log import log
from hybridflow.roles.groups import ModelGroup, RolloutGroup
from hybridflow.trainer.startup.run_setup import Run


class StepTraces:
    """Requests for the traces of one step.

    Args:
        settings: of the step's traces; None where it is not traced.
        run: with the directory for traces.
        number: of the step.
    """

    def __init__(self, settings: ProfileConfig | None, run: Run, number: int) -> None:
        self._settings, self._run, self._number = settings, run, number

    def trace_rollout(self, rollout: RolloutGroup | None) -> None:
        """Trace the next steps of the first engine."""
        if self._settings is None or not self._settings.rollout_steps or rollout is None:
            return
        directory = self._run.rollout_trace_directory(self._number)
        for why in filter(None, rollout.trace(directory, steps=self._settings.rollout_steps).result()):
            log.warning(f"step {self._number}: no trace of the rollout: {why}")

    def trace_updates(self, models: Mapping[str, ModelGroup], roles: Sequence[str]) -> None:
        """Trace the next update of these roles. `models`: by role."""
        if self._settings is not None:
            for role in roles:
                path = self._run.trace_path(self._number, role)
                models[role].trace_next_update(path, micro_batches=self._settings.micro_batches).result()
