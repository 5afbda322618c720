"""`hybridflow status` and `hybridflow logs`: a run watched from outside, also while it goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from engine3d.checkpoint.manifest import MANIFEST, find_checkpoints, read_manifest
from engine3d.errors import UserError, shortened
from engine3d.input_files import JsonError, parse_json
from hybridflow.cli.standard_streams import visible
from hybridflow.metrics.sinks import Record, console_line
from hybridflow.rundir.file_names import METRICS
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe, saved_to
from hybridflow.rundir.watching import (
    Log,
    checked_run,
    find_logs,
    follow,
    goes_on,
    last_lines,
    read_place,
)

_LINES = 20
_RECORDS = 200
"""Of the newest, among which one of a step is looked for."""


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow status`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow logs`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--role", metavar="ROLE", help="only of this role, such as actor; sglang for engines alone")
    parser.add_argument("--rank", type=int, metavar="N", help="only of this rank of each role")
    parser.add_argument("--lines", type=int, default=_LINES, metavar="N", help=f"last lines of each ({_LINES})")
    parser.add_argument("--follow", action="store_true", help="go on with what is added, until the run has ended")


def status(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, or something in it cannot be read.
    """
    for line in _status(checked_run(parsed.run), time.time()):
        print(line)
    return 0


def logs(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, nothing in it is what is asked for, or something cannot be read.
    """
    if parsed.lines < 0:
        raise UserError(f"--lines {parsed.lines}: expected at least 0")
    directory = checked_run(parsed.run)
    there = find_logs(directory)

    def is_wanted(log: Log) -> bool:
        return (parsed.role is None or log.is_of(parsed.role)) and parsed.rank in (None, log.rank)

    chosen = [log for log in there if is_wanted(log)]
    if not chosen and not (parsed.follow and goes_on(directory)):
        names = ", ".join(log.name for log in there) or "none"
        asked = " ".join(
            f"--{name} {shortened(str(value))}"
            for name, value in (("role", parsed.role), ("rank", parsed.rank))
            if value is not None
        )
        raise UserError(f"no log of {asked or 'any rank'} in {directory}; there are: {names}")
    if parsed.follow:
        for log, line in follow(directory, is_wanted, parsed.lines):
            print(_shown(log, line), flush=True)
        return 0
    for log in chosen:
        for line in last_lines(log.path, parsed.lines):
            print(_shown(log, line))
    return 0


def _shown(log: Log, line: bytes) -> str:
    return f"{log.name}: {_text(line)}"


def _text(line: bytes) -> str:
    """What a terminal shows of a line: of a progress bar the last state."""
    return visible(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def _status(directory: Path, now: float) -> Iterator[str]:
    place, is_going_on = read_place(directory), goes_on(directory)
    total = _steps(directory)
    at = "phase start"
    if place is not None:
        of = f" of {total}" if total is not None else ""
        at = f"step {place.step}{of}, {place.phase}" if place.step else f"phase {place.phase}"
        at += f" for {_duration(now - place.since)}" if is_going_on else f" (entered {_clock(place.since)})"
    if is_going_on:
        yield f"{directory}: goes on; {at}"
    elif place is not None and place.phase == "end":
        yield f"{directory}: has ended, {_clock(place.since)}"
    else:
        yield f"{directory}: does not go on; it ended in {at}"
    record = _newest_step(directory / METRICS)
    yield console_line(record, total, None) if record is not None else f"no step in {METRICS} yet"
    yield _newest_checkpoint(directory, now)
    found = find_logs(directory)
    width = max((len(log.name) for log in found), default=0)
    for log in found:
        told = [line for line in map(_text, last_lines(log.path, 20)) if line.strip()]
        age = _duration(now - log.path.stat().st_mtime)
        yield f"{log.name:<{width}}  " + (f"{age} ago: {shortened(told[-1], 160)}" if told else "has said nothing")


def _steps(directory: Path) -> int | None:
    """That the recipe asks for."""
    steps = kept_setting(read_kept_recipe(directory), "trainer.steps")
    return steps if isinstance(steps, int) else None


def _newest_step(path: Path) -> Record | None:
    """The newest record of a training step, or else of what came before the first."""
    if not path.exists():
        return None
    records = []
    for line in last_lines(path, _RECORDS):
        try:
            values = parse_json(line)
            phase, step = values.pop("phase"), values.pop("step")
            figures = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
            records.append(Record(str(phase), int(step), figures))
        except (JsonError, ValueError, KeyError, AttributeError, TypeError):
            continue  # cut off, or half written
    of_steps = [record for record in records if record.phase == "train"]
    return next(reversed(of_steps or records), None)


def _newest_checkpoint(directory: Path, now: float) -> str:
    root = saved_to(directory)
    whole = find_checkpoints(root)[0] if root is not None else []
    if not whole:
        return "no whole checkpoint"
    age = _duration(now - (whole[0] / MANIFEST).stat().st_mtime)
    return f"checkpoint {read_manifest(whole[0]).step}  {whole[0]}  {age} ago"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
