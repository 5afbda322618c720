"""The sinks of `metrics.Metrics`: JSON lines, CSV, TensorBoard, console."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine3d.errors import UserError
from engine3d.input_files import FileError, parse_json
from hybridflow.errors.log import log
from hybridflow.rundir.atomic_files import AppendedFile, replace_file, whole_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_RESUMED_PHASE = "train"


@dataclass(frozen=True)
class Record:
    """The figures of one step of one phase."""

    phase: str
    step: int
    values: dict[str, float]

    def before_resumption(self, resume_from_step: int) -> bool:
        """False for a training step past the one that the run resumes after: it and all that follow are made again."""
        return self.phase != _RESUMED_PHASE or self.step <= resume_from_step


class Sink(Protocol):
    """Somewhere to write records to."""

    def write(self, record: Record) -> None:
        """Write one record so that it survives the death of this process.

        Raises:
            OSError: it could not; the sink is as it was before, and can be asked again.
        """

    def close(self) -> None:
        """Release files."""


class Stamped(Protocol):
    """What is written of one step of a phase."""

    @property
    def phase(self) -> str:
        """Its name."""

    @property
    def step(self) -> int:
        """Counted in its phase."""


class StampedSink[R: Stamped](Protocol):
    """Somewhere to write such things to; as `Sink`."""

    def write(self, record: R) -> None:
        """Write one so that it survives the death of this process, or raise OSError."""

    def close(self) -> None:
        """Release files."""


class PatientSink[R: Stamped]:
    """A sink that cannot always be written to, because its disk is full or gone: records wait until it can.

    Says when that begins, and at the end which records were lost.
    """

    def __init__(self, sink: StampedSink[R], path: Path) -> None:
        self._sink, self._path = sink, path
        self._waiting: deque[R] = deque()

    def write(self, record: R) -> None:
        self._waiting.append(record)
        if (error := self._write_waiting()) is not None and len(self._waiting) == 1:
            self._say(f"{self._path} cannot be written: {_reason(error)}; records are kept until it can")

    def close(self) -> None:
        error = self._write_waiting()
        if error is not None:
            first, last = self._waiting[0], self._waiting[-1]
            lost = f"the records from {first.phase} {first.step} to {last.phase} {last.step} are lost"
            self._say(f"{self._path} cannot be written: {_reason(error)}; {lost}")
        with contextlib.suppress(OSError):
            self._sink.close()

    def _write_waiting(self) -> OSError | FileError | None:
        try:
            while self._waiting:
                self._sink.write(self._waiting[0])
                self._waiting.popleft()
        except (OSError, FileError) as error:
            return error
        return None

    @staticmethod
    def _say(line: str) -> None:
        log.warning(f"metrics: {line}")


def _reason(error: OSError | FileError) -> str:
    return (error.reason if isinstance(error, FileError) else error.strerror) or str(error)


def refuse_existing(path: Path) -> None:
    """Raises UserError for a sink that would write over another run's."""
    if path.exists():
        raise UserError(f"{path} already holds the metrics of a run: resume that run, or choose another run name")


def begin_lines(path: Path, resume_from_step: int | None) -> None:
    """Leave of a file of JSON lines what a run that resumes will not make again; a fresh run has none yet.

    Raises:
        UserError: the file is another run's, or a line is no object with phase and step.
    """
    if resume_from_step is None:
        refuse_existing(path)
    elif path.exists():
        kept = takewhile(lambda line: _parse(path, line).before_resumption(resume_from_step), whole_lines(path))
        replace_file(path, "".join(f"{line}\n" for line in kept))


def _parse(path: Path, line: str) -> Record:
    try:
        fields = parse_json(line)
        return Record(fields.pop("phase"), fields.pop("step"), fields)
    except (ValueError, KeyError, AttributeError):
        raise UserError(f"{path} holds {line.strip()[:60]!r}, expected an object with phase and step") from None


class JsonlSink:
    """One JSON object a line: phase, step, then the metrics. nan and infinity, which JSON lacks, become strings."""

    def __init__(self, path: Path, resume_from_step: int | None) -> None:
        begin_lines(path, resume_from_step)
        self._file = AppendedFile(path)

    def write(self, record: Record) -> None:
        values = {name: value if math.isfinite(value) else str(value) for name, value in record.values.items()}
        self._file.add(json.dumps({"phase": record.phase, "step": record.step} | values, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class CsvSink:
    """One row a record: phase, step, then one column a metric, empty where a record lacks it.

    Columns stand in the order in which their names first appeared. A record with a new name makes the file be written
    anew with one more column, which happens in the first steps of a run and hardly ever after.
    """

    def __init__(self, path: Path, resume_from_step: int | None) -> None:
        self._path = path
        self._columns = ["phase", "step"]
        if resume_from_step is None:
            refuse_existing(path)
        elif path.exists():
            self._rewrite(
                list(takewhile(lambda row: self._parse(row).before_resumption(resume_from_step), self._read()))
            )
        self._file = AppendedFile(path)

    def _read(self) -> list[dict[str, str]]:
        reader = csv.DictReader(whole_lines(self._path))
        rows = list(reader)
        if reader.fieldnames:
            self._columns = list(reader.fieldnames)
        return rows

    def _parse(self, row: dict[str, str]) -> Record:
        try:
            return Record(row["phase"], int(row["step"]), {})
        except (KeyError, ValueError, TypeError):
            raise UserError(f"{self._path} has a row without phase and step, so the run cannot append to it") from None

    def _rewrite(self, rows: Sequence[dict[str, str]]) -> None:
        scratch = self._path.with_name(self._path.name + ".new")
        with scratch.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(scratch, self._path)  # noqa: PTH105

    def write(self, record: Record) -> None:
        new_columns = [name for name in record.values if name not in self._columns]
        if new_columns or self._file.size == 0:
            rows = self._read()
            columns, self._columns = self._columns, [*self._columns, *new_columns]
            try:
                self._rewrite(rows)
            except OSError:
                self._columns = columns
                raise
            new = AppendedFile(self._path)
            self._file.close()
            self._file = new
        row = {"phase": record.phase, "step": record.step} | record.values
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([row.get(name, "") for name in self._columns])
        self._file.add(line.getvalue())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Event files, one TensorBoard run a phase, since a phase may count its own steps.

    A phase that a resumed run writes to again is shown up to the step that the run resumed after, then from there.
    """

    def __init__(self, directory: Path, resume_from_step: int | None) -> None:
        if resume_from_step is None:
            refuse_existing(directory)
        self._directory = directory
        self._resume_from_step = resume_from_step
        self._writers: dict[str, SummaryWriter] = {}
        self._phases: set[str] = set()

    def _writer(self, phase: str) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        if phase not in self._writers:
            threading.excepthook = _without_writers
            first = phase not in self._phases
            self._phases.add(phase)
            purge_step = self._resume_from_step + 1 if first and self._resume_from_step is not None else None
            self._writers[phase] = SummaryWriter(str(self._directory / phase), purge_step=purge_step)
        return self._writers[phase]

    def write(self, record: Record) -> None:
        try:
            writer = self._writer(record.phase)
            for name, value in record.values.items():
                writer.add_scalar(name, value, record.step)
            writer.flush()
        except OSError:
            self._give_up(record.phase)
            raise

    def _give_up(self, phase: str) -> None:
        """A writer that has failed once writes no more: the next record makes a new one, with a file of its own."""
        if (writer := self._writers.pop(phase, None)) is not None:
            with contextlib.suppress(Exception):
                writer.close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _without_writers(failed: threading.ExceptHookArgs) -> None:
    """Say nothing of a writer's thread that could not write: the next record raises the same, and the sink says so."""
    of_writer = type(failed.thread).__module__.startswith("tensorboard.")
    if not (of_writer and isinstance(failed.exc_value, OSError)):
        threading.__excepthook__(failed)


@dataclass(frozen=True)
class _Figure:
    """A figure of the console's lines.

    Args:
        rank: where a line has no room for all, those of the highest ranks are left out.
    """

    name: str
    label: str
    form: Callable[[float], str]
    rank: int


_CONSOLE_FIGURES = (
    _Figure("sft/loss", "loss", "{:.4f}".format, 0),
    _Figure("eval/accuracy", "accuracy", "{:.3f}".format, 0),
    _Figure("eval/reward_mean", "reward", "{:.3f}".format, 0),
    _Figure("eval/score_mean", "score", "{:.3f}".format, 0),
    _Figure("eval/training_accuracy", "accuracy on training prompts", "{:.3f}".format, 0),
    _Figure("eval/training_reward_mean", "reward on training prompts", "{:.3f}".format, 0),
    _Figure("eval/training_score_mean", "score on training prompts", "{:.3f}".format, 0),
    _Figure("reward/mean", "reward", "{:.3f}".format, 0),
    _Figure("cost/mean", "cost", "{:.3f}".format, 3),
    _Figure("train/loss", "loss", "{:+.4f}".format, 2),
    _Figure("critic/value_loss", "value loss", "{:.4f}".format, 7),
    _Figure("critic/explained_variance", "explained", "{:.2f}".format, 4),
    _Figure("train/reference_kl", "kl", "{:.4f}".format, 5),
    _Figure("distillation/kl_k1", "teacher kl", "{:.4f}".format, 5),
    _Figure("train/entropy", "entropy", "{:.3f}".format, 6),
    _Figure("train/gradient_norm", "gradient", "{:.3g}".format, 8),
    _Figure("mismatch/logprob_abs_diff_mean", "mismatch", "{:.1e}".format, 9),
    _Figure("rollout/throughput_tokens_per_sec", "tokens/s", "{:,.0f}".format, 10),
    _Figure("train/step_time_ms", "step", lambda milliseconds: f"{milliseconds / 1000:.2f} s", 1),
    _Figure("checkpoint/written_bytes", "written", lambda nbytes: f"{nbytes / 1e6:,.1f} MB", 0),
    _Figure("checkpoint/stall_ms", "stall", lambda milliseconds: f"{milliseconds / 1000:.3f} s", 0),
    _Figure("checkpoint/whole_after_sec", "whole after", "{:.2f} s".format, 0),
    _Figure("checkpoint/failed", "save", lambda _: "failed", 0),
)
_OF_SET = re.compile(r"eval/([^/]+)/(mean@\d+)")
"""The figure of a held-out set that is shown."""
_PHASE_LABELS = {"sft": "warm-up"}


def console_line(record: Record, total: int | None, width: int | None) -> str:
    """The line that shows a record.

    Args:
        record: whose figures are shown.
        total: steps of its phase, if known.
        width: columns that the line may have; None for any number.
    """
    label = _PHASE_LABELS.get(record.phase, record.phase)
    shown = [figure for figure in _CONSOLE_FIGURES if figure.name in record.values]
    shown += [
        _Figure(name, f"{found[1]} {found[2]}", "{:.3f}".format, 1)
        for name in record.values
        if (found := _OF_SET.fullmatch(name))
    ]
    while True:
        figures = [f"{figure.label} {figure.form(record.values[figure.name])}" for figure in shown]
        line = "  ".join([f"{label} {record.step}" + (f"/{total}" if total is not None else ""), *figures])
        if width is None or len(line) <= width or len(shown) <= 1:
            return line
        shown.remove(max(shown, key=lambda figure: figure.rank))


class ConsoleSink:
    """One line a record with the figures worth watching; on a terminal, as many as it has room for, and under the lines
    a progress bar of the phases whose steps are known.

    Args:
        stream: to write to.
        totals: steps of the phases, by name.
        first_step: of phase "train", that the run resumes after.
    """

    def __init__(self, stream: TextIO, totals: Mapping[str, int], first_step: int) -> None:
        self._totals = totals
        self._console = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
        self._progress: Progress | None = None
        self._phase = _RESUMED_PHASE
        if self._console.is_terminal and _RESUMED_PHASE in totals:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task(_RESUMED_PHASE, total=totals[_RESUMED_PHASE], completed=first_step)
            self._progress.start()

    def write(self, record: Record) -> None:
        total = self._totals.get(record.phase)
        self._console.print(console_line(record, total, self._console.width if self._console.is_terminal else None))
        self._console.file.flush()
        if self._progress is not None and total is not None:
            if record.phase != self._phase:
                self._phase = record.phase
                label = _PHASE_LABELS.get(record.phase, record.phase)
                self._progress.reset(self._task, total=total, description=label)
            self._progress.update(self._task, completed=record.step, refresh=record.step == total)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
