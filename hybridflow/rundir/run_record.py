"""Record of a run in its directory, `run.json`: every start with its command, host and software, and the result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, FileError
from engine3d.json_records import EpochSeconds, read_record
from hybridflow.errors.redaction import redacted_words
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import RUN_RECORD
from hybridflow.rundir.kept_recipe import saved_to


@dataclass(frozen=True)
class RunStart:
    """One start of a run: the first, or a resumption.

    Args:
        at: time, in seconds since the epoch.
        after_step: step of the checkpoint that the run resumes from; None of a fresh start.
        command: command line, quoted for a shell.
        host: name of the driver's host.
        versions: by distribution.
        commit: of the checkout; None where the code is no checkout.
        checkpoint: directory of the checkpoint that the run resumes from, which may be another run's.
    """

    at: EpochSeconds
    after_step: int | None
    command: str
    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Args:
        parameters, active_parameters: of the actor's model, all and those that one token uses; None where unknown.
        starts: at least one, the first one first.
        ended: time of the end after all steps, in seconds since the epoch; None before.
        results: lines of what its evaluations measured, first and last.
    """

    parameters: int | None
    active_parameters: int | None
    starts: tuple[RunStart, ...]
    ended: EpochSeconds | None = None
    results: tuple[str, ...] = ()


def command_line() -> str:
    """The command line of this process without its secrets, quoted for a shell."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *redacted_words(sys.argv[1:])])


def record_start(
    directory: Path,
    after_step: int | None,
    versions: Mapping[str, str],
    commit: str | None,
    parameters: int | None = None,
    active_parameters: int | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Add a start to the record. The arguments are as in `RunStart` and `RunRecord`.

    Raises:
        UserError: the record of the earlier starts is damaged.
        OSError: it cannot be written.
    """
    before = read_run_record(directory)
    resumed = None if checkpoint is None else str(checkpoint)
    start = RunStart(time.time(), after_step, command_line(), socket.gethostname(), versions, commit, resumed)
    starts = (*(before.starts if before is not None else ()), start)
    _write(directory, RunRecord(parameters, active_parameters, starts))


def record_end(directory: Path, results: Sequence[str]) -> None:
    """Add the end and the result lines of a run that has done all its steps.

    Raises:
        UserError: the record is damaged.
        OSError: it cannot be written.
    """
    record = read_run_record(directory)
    if record is not None:
        _write(directory, dataclasses.replace(record, ended=time.time(), results=tuple(results)))


def read_run_record(directory: Path) -> RunRecord | None:
    """The record of a run; None where the run has not written one.

    Raises:
        UserError: the file is damaged.
    """
    record = read_record(directory / RUN_RECORD, RunRecord, MOST_LIST_BYTES)
    if record is not None and not record.starts:
        raise FileError(directory / RUN_RECORD, "damaged: starts: expected at least one")
    return record


def started_from(directory: Path, saves_to: Path) -> Path | None:
    """The checkpoint of another directory that a run started from; None if it started afresh or from one of its own.

    Args:
        directory: of the run.
        saves_to: directory of its own checkpoints.

    Raises:
        UserError: the record is damaged.
    """
    record = read_run_record(directory)
    checkpoint = record.starts[-1].checkpoint if record is not None else None
    if checkpoint is None or Path(checkpoint).parent.resolve() == saves_to.resolve():
        return None
    return Path(checkpoint)


def began_with(directory: Path, named: Path) -> bool:
    """True if a run has begun with the checkpoint that a path names.

    Args:
        directory: of the run.
        named: a checkpoint, a directory of them, or another run's directory.
    """
    with contextlib.suppress(UserError):
        record = read_run_record(directory)
        roots = [root.resolve() for root in (named, saved_to(named)) if root is not None]
        started = [
            Path(start.checkpoint).resolve()
            for start in (record.starts if record is not None else ())
            if start.checkpoint is not None
        ]
        return any(checkpoint.is_relative_to(root) for checkpoint in started for root in roots)
    return False


def _write(directory: Path, record: RunRecord) -> None:
    replace_file(directory / RUN_RECORD, json.dumps(dataclasses.asdict(record), indent=1) + "\n")
