"""`hybridflow status`, `hybridflow logs`, `hybridflow report`: a run watched from outside, also while it continues."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine3d.checkpoint.manifest import MANIFEST, find_checkpoints, read_manifest
from engine3d.errors import UserError, shortened, visible
from engine3d.input_files import JsonError, parse_json
from hybridflow.cluster.hosts.description import listed
from hybridflow.metrics.sinks.console import console_line
from hybridflow.metrics.sinks.files import Record
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.file_names import EXPORT, FAILURE, LOGS, METRICS
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe, saved_to
from hybridflow.rundir.run_record import read_run_record
from hybridflow.rundir.status.first_failure import FirstFailure, read_earlier, read_failure
from hybridflow.rundir.status.heartbeat import Heartbeat, heartbeat_path, read_heartbeat, read_heartbeats
from hybridflow.rundir.status.hosts_file import read_hosts
from hybridflow.rundir.status.watching import (
    Log,
    checked_run,
    find_logs,
    follow,
    goes_on,
    last_lines,
    read_position,
)

_LINES = 20
_LATE_S = 10.0
"""Seconds without a heartbeat after which it is reported: a network file system may show a file a little later."""
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: ")
_RECORDS = 200
"""Newest records, among which the last step is searched."""


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow status`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow logs`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument("--role", metavar="ROLE", help="only of this role, such as actor; sglang for engines alone")
    parser.add_argument("--rank", type=int, metavar="N", help="only of this rank of each role")
    parser.add_argument("--host", metavar="NAME", help="only of ranks on this host, and of their engines")
    parser.add_argument(
        "--first-failure", action="store_true", help="what the run failed of, and the log of the rank that failed first"
    )
    parser.add_argument("--lines", type=int, default=_LINES, metavar="N", help=f"last lines of each ({_LINES})")
    parser.add_argument("--follow", action="store_true", help="continue with what is added, until the run has ended")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow report`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, such as runs/demo")
    parser.add_argument(
        "--steps",
        nargs=2,
        type=int,
        metavar="N",
        help="responses to held-out prompts and loads of experts of these two steps (the first and the last)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page to write (RUN/report.html)")


def status(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, or something in it cannot be read.
    """
    runs = runs_in(parsed.run)
    for run in runs:
        if len(runs) > 1:
            print(f"{visible(run.name)}:")
        for line in _status(checked_run(run), time.time()):
            print(visible(f"  {line}" if len(runs) > 1 else line))
    return 0


def logs(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: it is no run's directory, nothing in it is what is asked for, or something cannot be read.
    """
    if parsed.lines < 0:
        raise UserError(f"--lines {parsed.lines}: expected at least 0")
    if len(runs := runs_in(parsed.run)) > 1:
        raise UserError(f"{parsed.run} holds the runs of several actors, expected one: {', '.join(map(str, runs))}")
    directory = checked_run(parsed.run)
    there = find_logs(directory)
    selection = _selection(parsed)
    if parsed.first_failure:
        failure = _failure_of(directory, parsed)
        print("\n".join(map(visible, failure.lines())))
        if failure.role is None:
            return 0
        selection |= {"role": failure.role, "rank": failure.rank}
    hosts = {(beat.role, beat.rank): beat.host for beat in read_heartbeats(directory / LOGS)}

    def host_of(log: Log) -> str | None:
        if log.of_rank not in hosts and (beat := read_heartbeat(heartbeat_path(log.path_of_rank))) is not None:
            hosts[log.of_rank] = beat.host  # of a rank that has come meanwhile
        return hosts.get(log.of_rank)

    def is_wanted(log: Log) -> bool:
        return (
            (selection["role"] is None or log.is_of(selection["role"]))
            and selection["rank"] in (None, log.rank)
            and (selection["host"] is None or selection["host"] == host_of(log))
        )

    chosen = [log for log in there if is_wanted(log)]
    if not chosen and not (parsed.follow and goes_on(directory)):
        names = ", ".join(log.name for log in there) or "none"
        options = " ".join(
            f"--{name} {shortened(str(value))}" for name, value in selection.items() if value is not None
        )
        on = f", on {listed(sorted(set(hosts.values())))}" if selection["host"] is not None else ""
        raise UserError(f"no log of {options or 'any rank'} in {directory}; there are: {names}{on}")
    if parsed.follow:
        for log, line in follow(directory, is_wanted, parsed.lines):
            print(_shown(log, line), flush=True)
        return 0
    for log in chosen:
        for line in last_lines(log.path, parsed.lines):
            print(_shown(log, line))
    return 0


def report(parsed: argparse.Namespace) -> int:
    """Run `hybridflow report`.

    Raises:
        UserError: it is no run's directory, or something in it cannot be read.
    """
    from hybridflow.report.page import write_report

    runs = runs_in(parsed.run)
    if len(runs) > 1 and parsed.out is not None:
        raise UserError(
            f"{parsed.run} holds the runs of the actors {', '.join(run.name for run in runs)}; --out is the page of one"
        )
    for run in runs:
        print(write_report(run, parsed.out, tuple(parsed.steps) if parsed.steps else None))
    return 0


def _selection(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options that select logs."""
    return {"role": parsed.role, "rank": parsed.rank, "host": parsed.host}


def _failure_of(directory: Path, parsed: argparse.Namespace) -> FirstFailure:
    """Return the first failure of the run.

    Raises:
        UserError: it has not, or options contradict.
    """
    given = [f"--{name}" for name, value in _selection(parsed).items() if value is not None]
    given += ["--follow"] if parsed.follow else []
    if given:
        raise UserError(f"--first-failure with {given[0]}: it chooses the log itself")
    failure = read_failure(directory)
    if failure is None:
        raise UserError(f"no {FAILURE} in {directory}: the run has not failed")
    return failure


def _shown(log: Log, line: bytes) -> str:
    return f"{visible(log.name)}: {_text(line)}"


def _text(line: bytes) -> str:
    """Return a line as a terminal shows it: the last state of a progress bar."""
    return visible(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def _status(directory: Path, now: float) -> Iterator[str]:
    position, is_going_on = read_position(directory), goes_on(directory)
    total = _steps(directory, "train")
    at = "phase start"
    if position is not None:
        of = f" of {total}" if total is not None else ""
        at = f"step {position.step}{of}, {position.phase}" if position.step else f"phase {position.phase}"
        at += f" for {_duration(now - position.since)}" if is_going_on else f" (entered {_clock(position.since)})"
    is_finished = position is not None and position.phase == "end" and not is_going_on
    if position is not None and is_finished:
        yield f"{directory}: finished, {_clock(position.since)}"
        yield from _result(directory)
    elif is_going_on:
        yield f"{directory}: running; {at}"
    else:
        yield f"{directory}: not running; it ended in {at}"
    for number, earlier in enumerate(read_earlier(directory), 1):
        yield f"start {number} failed in {earlier.phase}, {_clock(earlier.at)}: {earlier.cause}"
    failure = read_failure(directory)
    if failure is not None:
        yield from failure.lines()
    record = _newest_step(directory / METRICS)
    if record is None:
        yield f"no step in {METRICS} yet"
    else:
        yield console_line(record, _steps(directory, record.phase), None)
    yield _newest_checkpoint(directory, now)
    if is_finished:
        if (directory / EXPORT).is_dir():
            yield f"model {directory / EXPORT}"
        yield f"hybridflow report {shlex.quote(str(directory))} draws its metrics, hybridflow logs shows its logs"
        return
    logs = find_logs(directory)
    beats = {(beat.role, beat.rank): beat for beat in read_heartbeats(directory / LOGS)}
    width = max((len(log.name) for log in logs), default=0)
    if is_going_on and (line := _hosts(directory, beats.values(), now)):
        yield line
    for log in logs:
        lines = _without_warnings([line for line in map(_text, last_lines(log.path, 20)) if line.strip()])
        age = _duration(now - log.path.stat().st_mtime)
        at = _at(log, beats.get(log.of_rank), now) if is_going_on else ""
        last = f"{age} ago: {shortened(lines[-1], 160)}" if lines else "has said nothing"
        yield f"{log.name:<{width}}  {at}{last}"


def _result(directory: Path) -> Iterator[str]:
    """Duration and measurements of a finished run; nothing of one that recorded none."""
    record = read_run_record(directory)
    if record is None or record.ended is None:
        return
    resumed = len(record.starts) - 1
    yield f"{_duration(record.ended - record.starts[0].at)} after its start" + (
        f", resumed {resumed} time{'s' if resumed > 1 else ''}" if resumed else ""
    )
    yield from record.results


def _without_warnings(lines: Sequence[str]) -> Sequence[str]:
    """The lines up to the last one that is not part of a Python warning; the warnings where there is nothing else."""
    kept = list(lines)
    while kept:
        if _WARNING.match(kept[-1]):
            kept.pop()
        elif len(kept) > 1 and kept[-1].startswith("  ") and _WARNING.match(kept[-2]):
            del kept[-2:]  # and the line of the source that it is about
        else:
            break
    return kept or [line for line in lines if _WARNING.match(line)]


def _hosts(directory: Path, beats: Iterable[Heartbeat], now: float) -> str:
    """The hosts of a run that a launcher has started, and those whose ranks are all silent; "" without a launcher."""
    names = [host.name for host in read_hosts(directory)]
    heard: dict[str, float] = {}
    for beat in beats:
        heard[beat.host] = max(beat.at, heard.get(beat.host, 0.0))
    late = [f"{name} for {_duration(now - at)}" for name, at in heard.items() if now - at > _LATE_S]
    return f"hosts {listed(names, 8)}" + (f"; no heartbeat of {listed(late)}" if late else "") if names else ""


def _at(log: Log, beat: Heartbeat | None, now: float) -> str:
    """Return the method of a rank of a running run, or the host of an engine."""
    if beat is None:
        return ""
    if log.role != beat.role:
        return f"on {beat.host}: "
    what = beat.method if beat.has_turn else f"waits for its turn in {beat.method}"
    done = f", {beat.completed:,} {beat.unit or 'parts'} done" if beat.completed and beat.method else ""
    if beat.total and beat.method:
        done = f", {beat.done:,} of {beat.total:,} {beat.unit}"
    late = f", no heartbeat for {_duration(now - beat.at)}" if now - beat.at > _LATE_S else ""
    return f"on {beat.host}: {what or 'idle'} for {_duration(now - beat.since)}{done}{late}; "


_STEPS_OF_PHASE = {"train": "trainer.steps", "sft": "warmup.steps"}


def _steps(directory: Path, phase: str) -> int | None:
    """The steps of a phase of the metrics in the run's recipe; None of a phase without steps of its own."""
    setting = _STEPS_OF_PHASE.get(phase)
    steps = kept_setting(read_kept_recipe(directory), setting) if setting is not None else None
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
            metrics = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")
            }
            records.append(Record(str(phase), int(step), metrics))
        except (JsonError, ValueError, KeyError, AttributeError, TypeError, OverflowError):
            continue  # cut off, or half written
    of_steps = [record for record in records if record.phase == "train"]
    return next(reversed(of_steps or records), None)


def _newest_checkpoint(directory: Path, now: float) -> str:
    root = saved_to(directory)
    complete = find_checkpoints(root)[0] if root is not None else []
    if not complete:
        return "no whole checkpoint"
    age = _duration(now - (complete[0] / MANIFEST).stat().st_mtime)
    return f"checkpoint {read_manifest(complete[0]).step}  {complete[0]}  {age} ago"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
