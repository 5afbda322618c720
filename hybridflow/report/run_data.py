"""Files of a run, as a report reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine3d.errors import UserError
from engine3d.input_files import MOST_CONFIG_BYTES, JsonError, open_regular, parse_json, read_text
from hybridflow.metrics.device_samples import DeviceSample, read_samples
from hybridflow.metrics.expert_loads import StepLoads, read_expert_loads
from hybridflow.metrics.timeline import TimelineSpan, read_spans
from hybridflow.report.stored_texts import StoredText, read_stored
from hybridflow.rundir.atomic_files import whole_lines
from hybridflow.rundir.file_names import DEVICES, EVALUATIONS, EXPERT_LOADS, METRICS, RECIPE, SAMPLES, TIMELINE
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe
from hybridflow.rundir.predicted_seconds import PredictedSeconds, read_predicted_seconds
from hybridflow.rundir.run_record import RunRecord, read_run_record
from hybridflow.rundir.samples.evaluation_texts import steps_with_texts
from hybridflow.rundir.samples.store import has_store
from hybridflow.rundir.status.first_failure import read_failure
from hybridflow.rundir.status.hosts_file import RunHost, read_hosts
from hybridflow.rundir.status.watching import RunPosition, goes_on, read_position

Floats = NDArray[np.float64]

_TEXT_BYTES = 256 * 1024
"""Bytes read from either end of a file of samples."""
_LAST_TEXTS = 16
_SAMPLE_KEYS = {"phase", "step", "prompt", "response", "answer", "reward", "version"}
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Series:
    """One metric over the steps of a phase that logged it.

    Args:
        steps, values: (n,) float64.
    """

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Phase:
    """Records of one phase.

    Args:
        steps: number of records.
        series: by metric name.
    """

    steps: int
    series: Mapping[str, Series]


@dataclass(frozen=True)
class RunData:
    """Data of a report.

    Args:
        name: of the run.
        phases: by name, in the order of their first records.
        recipe: as YAML reads it; empty where there is none.
        spans: of the timeline; empty where there is none.
        samples: of the GPUs; empty where there are none.
        texts: samples as texts, of the first step that has some and of the last ones.
        stored: samples of the last steps from the run's store, the newest step first; empty where it has none.
        expert_loads: of some of the steps, in their order; empty where no model has experts.
        hosts: of the run; empty where no launcher has started it.
        evaluations: directory of the texts of held-out sets; None if there are none.
        record: every start of the run and its result; None if the run wrote none.
        outcome: one sentence; empty if the run has not written its phase.
        recipe_text: the recipe's file; empty where there is none.
        predicted: seconds of a step when the run started; None where no profile fitted.
    """

    name: str
    phases: Mapping[str, Phase]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    spans: Sequence[TimelineSpan] = ()
    samples: Sequence[DeviceSample] = ()
    texts: Sequence[Mapping[str, Any]] = ()
    stored: Sequence[StoredText] = ()
    expert_loads: Sequence[StepLoads] = ()
    hosts: Sequence[RunHost] = ()
    evaluations: Path | None = None
    record: RunRecord | None = None
    outcome: str = ""
    recipe_text: str = ""
    predicted: PredictedSeconds | None = None

    @property
    def on_cpus(self) -> bool:
        """True if the recipe says that no role is on a GPU."""
        placement = self.setting("placement")
        placement = placement if isinstance(placement, dict) else {}
        pools = placement.get("pools") or {}
        maps = [pools.get(text, text) for role, text in placement.items() if role in ("actor", "rollout") and text]
        return bool(maps) and all(str(text).startswith("cpu") for text in maps)

    def series(self, name: str, phase: str = "train") -> Series | None:
        """Return a metric of a phase; None if it was not logged."""
        return self.phases[phase].series.get(name) if phase in self.phases else None

    def setting(self, dotted: str) -> Any:
        """Return a setting of the recipe such as "train.layout"; None where the recipe does not say."""
        return kept_setting(self.recipe, dotted)


def read_run(directory: Path) -> RunData:
    """Read a run's directory. The run may still be in progress.

    Raises:
        UserError: no such directory, no metrics in it, or something that cannot be read: the file and the line.
    """
    try:
        if not directory.is_dir():
            raise UserError(f"report: no such directory: {directory}; expected that of a run")
        metrics, timeline, devices = (directory / name for name in (METRICS, TIMELINE, DEVICES))
        loads = directory / EXPERT_LOADS
        if not metrics.exists():
            raise UserError(f"report: no {METRICS} in {directory}; a run writes it unless metrics.jsonl=false")
        phases = read_metrics(metrics)
        if not phases:
            raise UserError(f"report: {metrics} holds no records yet")
        record, path = read_run_record(directory), directory / RECIPE
        recipe = read_kept_recipe(directory) if path.exists() else {}
        return RunData(
            name=directory.resolve().name,
            phases=phases,
            recipe=recipe,
            spans=read_spans(timeline) if timeline.exists() else (),
            samples=read_samples(devices) if devices.exists() else (),
            texts=read_texts(directory / SAMPLES) if (directory / SAMPLES).exists() else (),
            stored=read_stored(directory) if has_store(directory) else (),
            expert_loads=read_expert_loads(loads) if loads.exists() else (),
            hosts=read_hosts(directory),
            evaluations=directory / EVALUATIONS if steps_with_texts(directory / EVALUATIONS) else None,
            record=record,
            outcome=_outcome(directory, record, kept_setting(recipe, "trainer.steps")),
            recipe_text=read_text(path, MOST_CONFIG_BYTES) if path.exists() else "",
            predicted=read_predicted_seconds(directory),
        )
    except OSError as error:
        raise UserError(f"report: {error.filename} cannot be read: {error.strerror}") from None


def read_metrics(path: Path) -> dict[str, Phase]:
    """Read the records of a metrics.jsonl, by phase.

    Raises:
        UserError: naming the file and the line that is no record.
    """
    counts: dict[str, int] = {}
    phases: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            values = parse_json(line)
            phase, step = values.pop("phase"), values.pop("step")
            if not isinstance(phase, str) or not isinstance(step, int):
                raise ValueError
            columns = phases.setdefault(phase, {})
            for name, value in values.items():
                steps, numbers = columns.setdefault(name, ([], []))
                numbers.append(_number(value))
                steps.append(step)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expected = "expected an object with phase, step and numbers"
            reason = f"; {error}" if isinstance(error, JsonError) else ""
            raise UserError(f"{path}:{number}: {line[:60]!r} is no record, {expected}{reason}") from None
        counts[phase] = counts.get(phase, 0) + 1
    return {
        phase: Phase(counts[phase], {name: Series(_floats(steps), _floats(y)) for name, (steps, y) in columns.items()})
        for phase, columns in phases.items()
    }


def read_texts(path: Path) -> list[Mapping[str, Any]]:
    """Read samples of a samples.jsonl: those of the first step, and the last ones. Of a long file no more is read.

    Raises:
        UserError: naming a line that is no sample.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= 2 * _TEXT_BYTES:
            begin, end = file.read().splitlines(keepends=True), []
        else:
            begin = file.read(_TEXT_BYTES).splitlines(keepends=True)[:-1]
            file.seek(size - _TEXT_BYTES)
            end = file.read().splitlines(keepends=True)[1:]
    texts = [_text(path, line) for line in (*begin, *end) if line.endswith(b"\n")]  # a kill leaves half a line
    first = [text for text in texts if (text["phase"], text["step"]) == (texts[0]["phase"], texts[0]["step"])]
    return [*first, *texts[max(len(first), len(texts) - _LAST_TEXTS) :]]


def _text(path: Path, line: bytes) -> Mapping[str, Any]:
    try:
        fields = parse_json(line)
        if not isinstance(fields, dict) or not set(fields) >= _SAMPLE_KEYS or not isinstance(fields["step"], int):
            raise ValueError
    except ValueError:
        raise UserError(f"{path}: {line[:60]!r} is no sample, expected an object with prompt and response") from None
    return dict(fields)


def _number(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError


def _floats(values: Sequence[float]) -> Floats:
    return np.asarray(values, dtype=np.float64)


def finite(values: Floats) -> Floats:
    """Return the finite values."""
    return values[np.isfinite(values)]


def median(series: Series | None) -> float:
    """Return the median of the finite values; nan if there are none."""
    return float(np.median(kept)) if series is not None and len(kept := finite(series.values)) else math.nan


def _outcome(directory: Path, record: RunRecord | None, steps: object) -> str:
    """Return a sentence, then a line for each measurement of a finished run; empty if the phase is unknown.

    Args:
        directory: of the run.
        record: of its starts and its end, if it has one.
        steps: that its recipe asks for; None if unknown.

    Raises:
        UserError: a file of the run is damaged.
    """
    position = read_position(directory)
    if position is None:
        return ""
    began = record.starts[0].at if record is not None else None
    if goes_on(directory):
        return f"Running: {_position(position, steps)}."
    if position.phase == "end":
        all_ended = record.ended if record is not None else None
        ended = all_ended if all_ended is not None else position.since
        results = "".join(f"\n{line}" for line in (record.results if record is not None else ()))
        if all_ended is None and isinstance(steps, int) and 0 < position.step < steps:  # a loop of one's own
            return f"Ended after step {position.step:,} of {steps:,}{_duration('in', began, ended)}.{results}"
        done = f" all {steps:,} steps" if isinstance(steps, int) else ""
        return f"Finished{done}{_duration('in', began, ended)}.{results}"
    failure = read_failure(directory)
    if failure is not None:
        return f"Failed in {failure.phase}{_duration('after', began, failure.at)}: {failure.cause}"
    return f"Stopped in {_position(position, steps)}{_duration('after', began, position.since)}."


def _position(position: RunPosition, steps: object) -> str:
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    return f"step {position.step:,}{of}, {position.phase}" if position.step else f"phase {position.phase}"


def _duration(word: str, began: float | None, now: float) -> str:
    if began is None:
        return ""
    seconds = max(0.0, now - began)
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f" {word} {seconds / size:.1f} {unit}"
    return f" {word} {seconds:.0f} s"
