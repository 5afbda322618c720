"""The sink of `metrics.Metrics` for Weights & Biases, which is installed by who wants it."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import uuid
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import read_text
from hybridflow.errors.redaction import redacted_arguments
from hybridflow.metrics.config import WandbConfig
from hybridflow.metrics.sinks.files import Record, refuse_existing
from hybridflow.rundir.file_names import RECIPE
from hybridflow.rundir.yaml_reader import read_yaml_file

_TRIED = "0.31.0"
"""The version that the tests have run with."""
_TRAINING = "train"
_RUN_ID = "run-id"


_OFFLINE = "metrics.wandb.mode=offline keeps the run on this machine"


def mode_of(config: WandbConfig) -> str:
    """The mode of a run: that of the recipe, of the environment, or online."""
    return config.mode or os.environ.get("WANDB_MODE") or "online"


def check_wandb(config: WandbConfig) -> None:
    """Check that wandb is installed, and knows a key where it is to upload.

    Raises:
        UserError: it is not installed, or there is no key.
    """
    _check_installed()
    import wandb

    if mode_of(config) != "online" or "prompt" not in inspect.signature(wandb.login).parameters:
        return  # an older one says so when it begins
    with contextlib.redirect_stderr(io.StringIO()):
        known = wandb.login(prompt=False)
    if not known:
        raise UserError(
            f"metrics.wandb: wandb has no API key here; expected `wandb login` or WANDB_API_KEY before that; {_OFFLINE}"
        )


def _check_installed() -> None:
    try:
        from wandb import init  # noqa: F401  # a directory of that name, as runs of wandb leave, would do as a module
    except ImportError:
        raise UserError(
            "metrics.wandb: wandb is not installed here; install it with "
            f".venv/bin/uv pip install --python .venv/bin/python wandb=={_TRIED}"
        ) from None


class WandbSink:
    """A run of Weights & Biases, with its files in a directory of the run's own.

    Steps are counted within a phase: what phase p logs is plotted over `p/step`, and its name gets the phase in front
    unless it begins with that or the phase is training, as in `sft/train/gradient_norm`. wandb's environment variables
    count where the recipe says nothing.

    A resumed run continues under the same identifier. W&B keeps everything: steps that are made again are there twice.
    And wandb writes what it is given some seconds later: of a run that is killed it lacks the last ones.

    Raises:
        UserError: wandb is not installed, or refuses to begin.
    """

    def __init__(self, config: WandbConfig, directory: Path, resume_from_step: int | None) -> None:
        _check_installed()
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
                    project=config.project or os.environ.get("WANDB_PROJECT") or "hybridflow",
                    entity=config.entity,
                    tags=config.tags or None,
                    name=directory.parent.name,
                    id=read_text(identifier, 4096).strip(),
                    resume="allow",
                    mode=mode_of(config),  # type: ignore[arg-type]
                    dir=directory.parent,
                    config=read_yaml_file(recipe)[0] if recipe.exists() else None,
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except (wandb.Error, ValueError) as error:  # the latter for a setting from the environment
            reason = f"metrics.wandb: wandb refuses to begin: {' '.join(str(error).split())}"
            raise UserError(f"{reason}; {_OFFLINE}" if mode_of(config) == "online" else reason) from None
        self._defined: set[str] = set()

    def write(self, record: Record) -> None:
        """Hand the record to wandb's own process. Raises OSError if that is gone."""
        counter = f"{record.phase}/step"
        values = {name_in_phase(record.phase, name): value for name, value in record.values.items()}
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


def name_in_phase(phase: str, name: str) -> str:
    """The name of a metric where a name has one step counter: no other phase may log it too."""
    return name if phase == _TRAINING or name.startswith(f"{phase}/") else f"{phase}/{name}"
