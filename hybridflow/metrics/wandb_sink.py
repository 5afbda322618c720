"""The sink of `metrics.Metrics` for Weights & Biases, which is installed by who wants it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from hybridflow.errors.redaction import redacted_arguments
from hybridflow.metrics.sinks import Record, refuse_existing
from hybridflow.rundir.file_names import RECIPE
from hybridflow.rundir.yaml_reader import read_yaml_file

_TRIED = "0.31.0"
"""The version that the tests have run with."""
_TRAINING = "train"
_RUN_ID = "run-id"


def check_wandb() -> None:
    """Whether wandb is there.

    Raises:
        UserError: it is not; how to install it.
    """
    try:
        from wandb import init  # noqa: F401  # a directory of that name, as runs of wandb leave, would do as a module
    except ImportError:
        raise UserError(
            "metrics.wandb=true: wandb is not installed here; install it with "
            f".venv/bin/uv pip install --python .venv/bin/python wandb=={_TRIED}"
        ) from None


class WandbSink:
    """A run of Weights & Biases, with its files in a directory of the run's own.

    It is kept on this machine, for `wandb sync` to upload, unless the environment variable WANDB_MODE says otherwise;
    WANDB_PROJECT and wandb's other variables count too. Steps are counted within a phase: what phase p logs is plotted
    over `p/step`, and its name gets the phase in front unless it begins with that or the phase is training, as in
    `sft/train/gradient_norm`.

    A resumed run goes on under the same identifier. W&B forgets nothing: the steps that are made again, it has twice.
    And wandb writes what it is given some seconds later: of a run that is killed it lacks the last ones.

    Raises:
        UserError: wandb is not installed, or refuses to begin.
    """

    def __init__(self, directory: Path, resume_from_step: int | None) -> None:
        check_wandb()
        import wandb

        if resume_from_step is None:
            refuse_existing(directory)
        directory.mkdir(parents=True, exist_ok=True)
        identifier = directory / _RUN_ID
        if not identifier.exists():
            identifier.write_text(f"{uuid.uuid4().hex}\n")
        recipe = directory.parent / RECIPE
        self._error: type[Exception] = wandb.Error
        try:
            with redacted_arguments():
                self._run: Any = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "hybridflow"),
                    name=directory.parent.name,
                    id=identifier.read_text().strip(),
                    resume="allow",
                    mode=os.environ.get("WANDB_MODE", "offline"),
                    dir=directory.parent,
                    config=read_yaml_file(recipe)[0] if recipe.exists() else None,
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except (wandb.Error, ValueError) as error:  # the latter for a setting from the environment
            raise UserError(f"metrics.wandb=true: wandb refuses to begin: {' '.join(str(error).split())}") from None
        self._defined: set[str] = set()

    def write(self, record: Record) -> None:
        """Hand the record to wandb's own process. Raises OSError if that is gone."""
        counter = f"{record.phase}/step"
        values = {_name(record.phase, name): value for name, value in record.values.items()}
        try:
            for name in values.keys() - self._defined:
                self._run.define_metric(name, step_metric=counter)
                self._defined.add(name)
            self._run.log({counter: record.step, **values})
        except self._error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Finish the run: what is written is then whole."""
        try:
            self._run.finish()
        except self._error as error:
            raise OSError(str(error)) from error


def _name(phase: str, name: str) -> str:
    """What a figure is called in W&B, where a name has one step counter: no other phase may log it too."""
    return name if phase == _TRAINING or name.startswith(f"{phase}/") else f"{phase}/{name}"
