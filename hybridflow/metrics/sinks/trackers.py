"""Sinks of `metrics.Metrics` for MLflow and trackio, which are installed by who wants them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import read_text
from hybridflow.metrics.config import MlflowConfig, TrackioConfig
from hybridflow.metrics.sinks.files import Record, refuse_existing
from hybridflow.metrics.sinks.wandb_sink import name_in_phase
from hybridflow.rundir.file_names import RECIPE
from hybridflow.rundir.yaml_reader import read_yaml_file

_TRIED = {"mlflow": "mlflow-skinny==3.17.2", "trackio": "trackio==0.43.0"}
"""Versions that these sinks have run with."""
_RUN_ID = "run-id"
_OTHERS = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that names of MLflow do not have, such as that of pass@8."""
_PARAMETERS, _LONGEST_PARAMETER = 100, 500
"""Limits of MLflow for a request."""


def check_trackers(mlflow: MlflowConfig | None, trackio: TrackioConfig | None) -> None:
    """Check that the libraries of these sinks are installed, and that MLflow has somewhere to write to.

    Raises:
        UserError: naming the setting.
    """
    if mlflow is not None:
        _imported("mlflow")
        _tracking_uri(mlflow)
    if trackio is not None:
        _imported("trackio")


def _imported(library: str) -> Any:
    try:
        module = importlib.import_module(library)
        if module.__file__ is None:  # a directory of that name
            raise ImportError
    except ImportError:
        raise UserError(
            f"metrics.{library}: {library} is not installed here; install it with "
            f".venv/bin/uv pip install --python .venv/bin/python {_TRIED[library]}"
        ) from None
    return module


def _tracking_uri(config: MlflowConfig) -> str:
    if (uri := config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")) is None:
        raise UserError(
            "metrics.mlflow: no tracking_uri, expected one such as http://host:5000 or sqlite:///mlflow.db, or "
            "MLFLOW_TRACKING_URI"
        )
    return uri


def _recipe_of(directory: Path) -> Mapping[str, Any]:
    recipe = directory.parent / RECIPE
    return read_yaml_file(recipe)[0] if recipe.exists() else {}


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", shortened(str(value), _LONGEST_PARAMETER)


def _begin(directory: Path, resume_from_step: int | None) -> Path:
    """The file with the identifier of the run."""
    if resume_from_step is None:
        refuse_existing(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / _RUN_ID


@contextlib.contextmanager
def _failing(setting: str, kind: type[Exception]) -> Iterator[None]:
    """Say of which sink an error is."""
    try:
        yield
    except (kind, OSError) as error:
        raise UserError(f"{setting}: refuses to begin: {shortened(' '.join(str(error).split()), 300)}") from None


class MlflowSink:
    """A run of MLflow. A resumed run continues under the same identifier: steps that are made again, it has twice.

    Raises:
        UserError: mlflow is not installed, or its server refuses the run.
    """

    def __init__(self, config: MlflowConfig, directory: Path, resume_from_step: int | None) -> None:
        mlflow = _imported("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        identifier = _begin(directory, resume_from_step)
        with _failing("metrics.mlflow", self._error):
            self._client = mlflow.MlflowClient(tracking_uri=_tracking_uri(config))
            if not identifier.exists():
                identifier.write_text(f"{self._new_run(config, directory)}\n")
            self._run = read_text(identifier, 4096).strip()
            self._client.update_run(self._run, status="RUNNING")

    def _new_run(self, config: MlflowConfig, directory: Path) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        run = self._client.create_run(experiment_id, run_name=directory.parent.name, tags=dict(config.tags))
        parameter = importlib.import_module("mlflow.entities").Param
        parameters = [parameter(*setting) for setting in _flat(_recipe_of(directory))]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[first : first + _PARAMETERS])
        return str(run.info.run_id)

    def write(self, record: Record) -> None:
        """Send the record. Raises OSError if the server does not take it."""
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_OTHERS.sub("_", name_in_phase(record.phase, name)), value, now, record.step)
            for name, value in record.values.items()
        ]
        try:
            self._client.log_batch(self._run, metrics=metrics)
        except self._error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """End the run."""
        try:
            self._client.set_terminated(self._run)
        except self._error as error:
            raise OSError(str(error)) from error


class TrackioSink:
    """A run of trackio, in its database on this machine or in a Space.

    Raises:
        UserError: trackio is not installed, or refuses to begin.
    """

    def __init__(self, config: TrackioConfig, directory: Path, resume_from_step: int | None) -> None:
        self._trackio = _imported("trackio")
        _begin(directory, resume_from_step).touch()
        with _failing("metrics.trackio", Exception), _quiet():
            self._run = self._trackio.init(
                project=config.project,
                name=directory.parent.name,
                space_id=config.space_id,
                config=dict(_recipe_of(directory)),
                resume="never" if resume_from_step is None else "allow",
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, record: Record) -> None:
        """Hand the record to trackio."""
        self._run.log(
            {name_in_phase(record.phase, name): value for name, value in record.values.items()}, step=record.step
        )

    def close(self) -> None:
        """Finish the run."""
        with _quiet():
            self._run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield
