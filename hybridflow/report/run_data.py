"""What a run has written, as a report reads it."""

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
from engine3d.input_files import JsonError, open_regular, parse_json
from hybridflow.metrics.device_samples import DeviceSample, read_samples
from hybridflow.metrics.timeline import Span, read_spans
from hybridflow.report.outcome import read_outcome
from hybridflow.report.stored_texts import StoredText, read_stored
from hybridflow.rundir.atomic_files import whole_lines
from hybridflow.rundir.evaluation_texts import steps_with_texts
from hybridflow.rundir.file_names import DEVICES, EVALUATIONS, METRICS, RECIPE, SAMPLES, TIMELINE
from hybridflow.rundir.hosts_file import RunHost, read_hosts
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe
from hybridflow.rundir.run_record import RunRecord, read_run_record
from hybridflow.rundir.stored_samples import has_store

Floats = NDArray[np.float64]

_TEXT_BYTES = 256 * 1024
"""That are read of a file of samples from either end."""
_LAST_TEXTS = 16
_OF_A_SAMPLE = {"phase", "step", "prompt", "response", "answer", "reward", "version"}
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Series:
    """One figure over the steps of a phase that have it.

    Args:
        steps, values: (n,) float64.
    """

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class Phase:
    """What was logged of one phase.

    Args:
        steps: how many records there are.
        series: by metric name.
    """

    steps: int
    series: Mapping[str, Series]


@dataclass(frozen=True)
class RunData:
    """All that a report is made of.

    Args:
        name: of the run.
        phases: by name, in the order of their first records.
        recipe: as YAML reads it; empty where there is none.
        spans: of the timeline; empty where there is none.
        samples: of the GPUs; empty where there are none.
        texts: samples as texts, of the first step that has some and of the last ones.
        stored: samples of the last steps from the run's store, the newest step first; empty where it has none.
        hosts: of the run; empty where no launcher has started it.
        evaluations: directory of the texts of held-out sets; None where there are none.
        record: every start of the run and its result; None of a run that wrote none.
        outcome: one sentence; empty where the run has not said in which phase it is.
        recipe_text: the recipe's file; empty where there is none.
    """

    name: str
    phases: Mapping[str, Phase]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    samples: Sequence[DeviceSample] = ()
    texts: Sequence[Mapping[str, Any]] = ()
    stored: Sequence[StoredText] = ()
    hosts: Sequence[RunHost] = ()
    evaluations: Path | None = None
    record: RunRecord | None = None
    outcome: str = ""
    recipe_text: str = ""

    @property
    def on_cpus(self) -> bool:
        """Whether the recipe says that no role is on a GPU."""
        placement = self.setting("placement")
        placement = placement if isinstance(placement, dict) else {}
        pools = placement.get("pools") or {}
        maps = [pools.get(text, text) for role, text in placement.items() if role in ("actor", "rollout") and text]
        return bool(maps) and all(str(text).startswith("cpu") for text in maps)

    def series(self, name: str, phase: str = "train") -> Series | None:
        """A figure of a phase, if it was logged."""
        return self.phases[phase].series.get(name) if phase in self.phases else None

    def setting(self, dotted: str) -> Any:
        """A setting of the recipe such as "train.layout"; None where the recipe does not say."""
        return kept_setting(self.recipe, dotted)


def read_run(directory: Path) -> RunData:
    """What is in a run's directory. The run may still be going on.

    Raises:
        UserError: no such directory, no metrics in it, or something that cannot be read: the file and the line.
    """
    try:
        if not directory.is_dir():
            raise UserError(f"report: no such directory: {directory}; expected that of a run")
        metrics, timeline, devices = (directory / name for name in (METRICS, TIMELINE, DEVICES))
        if not metrics.exists():
            raise UserError(f"report: no {METRICS} in {directory}; a run writes it unless metrics.jsonl=false")
        phases = read_metrics(metrics)
        if not phases:
            raise UserError(f"report: {metrics} holds no records yet")
        record, recipe = read_run_record(directory), directory / RECIPE
        return RunData(
            name=directory.resolve().name,
            phases=phases,
            recipe=read_kept_recipe(directory) if recipe.exists() else {},
            spans=read_spans(timeline) if timeline.exists() else (),
            samples=read_samples(devices) if devices.exists() else (),
            texts=read_texts(directory / SAMPLES) if (directory / SAMPLES).exists() else (),
            stored=read_stored(directory) if has_store(directory) else (),
            hosts=read_hosts(directory),
            evaluations=directory / EVALUATIONS if steps_with_texts(directory / EVALUATIONS) else None,
            record=record,
            outcome=read_outcome(directory, record),
            recipe_text=recipe.read_text(errors="replace") if recipe.exists() else "",
        )
    except OSError as error:
        raise UserError(f"report: {error.filename} cannot be read: {error.strerror}") from None


def read_metrics(path: Path) -> dict[str, Phase]:
    """The records of a metrics.jsonl, by phase.

    Raises:
        UserError: naming the file and the line that is no record.
    """
    counts: dict[str, int] = {}
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            values = parse_json(line)
            phase, step = values.pop("phase"), values.pop("step")
            if not isinstance(phase, str) or not isinstance(step, int):
                raise ValueError
            columns = found.setdefault(phase, {})
            for name, value in values.items():
                steps, figures = columns.setdefault(name, ([], []))
                figures.append(_number(value))
                steps.append(step)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            expected = "expected an object with phase, step and numbers"
            reason = f"; {error}" if isinstance(error, JsonError) else ""
            raise UserError(f"{path}:{number}: {line[:60]!r} is no record, {expected}{reason}") from None
        counts[phase] = counts.get(phase, 0) + 1
    return {
        phase: Phase(counts[phase], {name: Series(_floats(steps), _floats(y)) for name, (steps, y) in columns.items()})
        for phase, columns in found.items()
    }


def read_texts(path: Path) -> list[Mapping[str, Any]]:
    """Some samples of a samples.jsonl: those of the first step, and the last ones. Of a long file no more is read.

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
    found = [_text(path, line) for line in (*begin, *end) if line.endswith(b"\n")]  # a kill leaves half a line
    first = [text for text in found if (text["phase"], text["step"]) == (found[0]["phase"], found[0]["step"])]
    return [*first, *found[max(len(first), len(found) - _LAST_TEXTS) :]]


def _text(path: Path, line: bytes) -> Mapping[str, Any]:
    try:
        fields = parse_json(line)
        if not isinstance(fields, dict) or not set(fields) >= _OF_A_SAMPLE:
            raise ValueError
    except ValueError:
        raise UserError(f"{path}: {line[:60]!r} is no sample, expected an object with prompt and response") from None
    return dict(fields)


def _number(value: object) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in _NOT_FINITE):
        raise ValueError
    return float(value)  # type: ignore[arg-type]


def _floats(values: Sequence[float]) -> Floats:
    return np.asarray(values, dtype=np.float64)


def finite(values: Floats) -> Floats:
    """Those that are numbers."""
    return values[np.isfinite(values)]


def median(series: Series | None) -> float:
    """Of the finite values; nan where there are none."""
    return float(np.median(kept)) if series is not None and len(kept := finite(series.values)) else math.nan
