"""Weights from the actor to the rollout engines."""

from __future__ import annotations

import shutil
from pathlib import Path

from hybridflow.worker_group import WorkerGroup


class WeightSync:
    """Brings every rollout engine to the actor's weights, as one numbered version.

    The actor's ranks write their parts of one HuggingFace directory side by side and the engines read it: nothing is
    gathered, and `directory` must be seen by all nodes. It is removed at the end of the `with` block.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, directory: Path) -> None:
        self._actor, self._rollout, self._directory = actor, rollout, directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def sync_weights(self, version: int) -> None:
        """Every engine serves `version` when this returns; one whose transfer failed refuses to generate."""
        weights = self._directory / f"version-{version}"
        self._actor.export(weights).result()
        self._rollout.load_weights(weights, version).result()
        shutil.rmtree(weights)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
