"""The sinks of `metrics.Metrics` that are files: JSON lines, CSV, TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine3d.errors import UserError
from engine3d.input_files import FileError, parse_json
from hybridflow.errors.log import log
from hybridflow.rundir.atomic_files import AppendedFile, replace_file, whole_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_RESUMED_PHASE = "train"


@dataclass(frozen=True)
class Record:
    """Metrics of one step of one phase."""

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
    """Record of one step of a phase, as it is written."""

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
        phase, step = fields.pop("phase"), fields.pop("step")
        if not isinstance(phase, str) or not isinstance(step, int):
            raise ValueError
        return Record(phase, step, fields)
    except (ValueError, KeyError, AttributeError, TypeError):
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
    again with one more column, which happens in the first steps of a run and hardly ever after.
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
