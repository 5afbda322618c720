"""Metrics and samples of a run, written to all its sinks."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TextIO

from engine3d.cleaning import cleaning
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.expert_loads import ExpertLoads, ExpertLoadSink, StepLoads
from hybridflow.metrics.sinks.console import ConsoleSink
from hybridflow.metrics.sinks.files import CsvSink, JsonlSink, PatientSink, Record, Sink, TensorBoardSink
from hybridflow.metrics.sinks.sample_file import SampleSink, SampleText, StepSamples
from hybridflow.metrics.sinks.trackers import MlflowSink, TrackioSink
from hybridflow.metrics.sinks.wandb_sink import WandbSink
from hybridflow.rundir.file_names import EXPERT_LOADS, METRICS, SAMPLES


class Metrics:
    """Writes metrics.jsonl, metrics.csv, tensorboard/<phase>/ and wandb/ under `directory`; shows records on `stream`.

    A record survives the death of the process as soon as `log` has returned (but for wandb, see there); where a file
    cannot be written, as on a full disk, its records wait in memory until it can, and a line on stderr says so. A fresh
    run (`resume_from_step` is None) raises UserError if the directory already holds metrics. A run that resumes after
    step s of phase "train" appends, once it has dropped the first record of that phase past s with all that were
    written after it, whatever their phase, since they will be made again, and any half-written last line. `totals` has
    the steps of each phase whose number is known.
    """

    def __init__(
        self,
        config: MetricsConfig,
        directory: Path,
        *,
        totals: Mapping[str, int] | None = None,
        resume_from_step: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        kinds: dict[str, Callable[[Path, int | None], Sink] | None] = {
            METRICS: JsonlSink if config.jsonl else None,
            "metrics.csv": CsvSink if config.csv else None,
            "tensorboard": TensorBoardSink if config.tensorboard else None,
            "wandb": partial(WandbSink, config.wandb) if config.wandb is not None else None,
            "mlflow": partial(MlflowSink, config.mlflow) if config.mlflow is not None else None,
            "trackio": partial(TrackioSink, config.trackio) if config.trackio is not None else None,
        }
        for name, kind in kinds.items():
            if kind is not None:
                path = directory / name
                self._sinks.append(PatientSink(kind(path, resume_from_step), path))
        self._samples: PatientSink[StepSamples] | None = None
        if config.samples_per_step:
            path = directory / SAMPLES
            self._samples = PatientSink(SampleSink(path, resume_from_step), path)
        self._expert_loads: PatientSink[StepLoads] | None = None
        if config.jsonl:
            path = directory / EXPERT_LOADS
            self._expert_loads = PatientSink(ExpertLoadSink(path, resume_from_step), path)
        self._console: ConsoleSink | None = None
        if config.console:
            self._console = ConsoleSink(sys.stdout if stream is None else stream, totals or {}, resume_from_step or 0)
            self._sinks.append(self._console)

    def begin(self, phase: str, sentence: str) -> None:
        """Show on the console that a phase begins, with one sentence that says what it is."""
        if self._console is not None:
            self._console.begin(phase, sentence)

    def log(self, step: int, values: Mapping[str, float], *, phase: str = "train") -> None:
        """Write one record. Raises ValueError for a value that is not a number (nan and infinity are numbers here)."""
        for name, value in values.items():
            if name in ("phase", "step"):
                raise ValueError(f"metric name {name!r} is taken by the record itself")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"metric {name!r} of step {step} is {value!r}, expected a number")
        record = Record(phase, step, dict(values))
        for sink in self._sinks:
            sink.write(record)

    def log_samples(self, step: int, samples: Sequence[SampleText]) -> None:
        """Write some samples of a step; to be called after its record was logged."""
        if self._samples is not None and samples:
            self._samples.write(StepSamples("train", step, samples))

    def log_expert_loads(self, step: int, models: Mapping[str, ExpertLoads]) -> None:
        """Write the expert loads of a step by role; nothing where no model has experts."""
        if self._expert_loads is not None and models:
            self._expert_loads.write(StepLoads("train", step, models))

    def close(self) -> None:
        """Close every sink. May be called twice."""
        with contextlib.ExitStack() as stack:  # each, whatever becomes of the others
            while self._sinks:
                stack.callback(self._sinks.pop().close)
            if self._samples is not None:
                stack.callback(self._samples.close)
                self._samples = None
            if self._expert_loads is not None:
                stack.callback(self._expert_loads.close)
                self._expert_loads = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with cleaning("hybridflow: metrics"):
            self.close()


class Timer:
    """Measures a phase: `with Timer(values, TRAIN_STEP_TIME): ...` adds its wall milliseconds to values[name]."""

    def __init__(self, values: dict[str, float], name: str) -> None:
        self._values = values
        self._name = name
        self.milliseconds = math.nan
        """Wall time of the phase, once it has ended."""

    def __enter__(self) -> Timer:
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.milliseconds = (time.perf_counter() - self._start) * 1000
        self._values[self._name] = self._values.get(self._name, 0.0) + self.milliseconds
