"""First failure of a run, in its directory: cause, location, and the method of every rank.

    python -m hybridflow.rundir.status.first_failure DIRECTORY CAUSE

keeps the cause of a run that is gone without having said why, unless it has kept one or continues.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine3d.errors import UserError, shortened, visible
from engine3d.json_records import EpochSeconds, read_record
from engine3d.stacks import STACKS
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import EARLIER_FAILURE, FAILURE, FLIGHT_RECORDER, LOGS
from hybridflow.rundir.status.heartbeat import Heartbeat, read_heartbeats
from hybridflow.rundir.status.watching import goes_on, last_lines, read_position

_LINE = 300
"""Characters of a log's line."""


@dataclass(frozen=True)
class FirstFailure:
    """The card of a failure. Times are in seconds since the epoch.

    Args:
        cause: one line.
        phase: step and phase of the run.
        at: when the run learned of it.
        since: when the rank stopped making progress, or failed.
        role, rank: that failed, where it was a rank.
        host: on which, where it is known.
        pid: of the rank's process, on its host.
        last_line: of the log of a rank that died without a word.
        others: what every other rank was at when it said so last, one line a group of them.
        stacks: where the stacks of all ranks are; None if there are none.
        flight_recorder: where the last collective operations of ranks on GPUs are; None if nowhere.
    """

    cause: str
    phase: str
    at: EpochSeconds
    since: EpochSeconds
    role: str | None = None
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    last_line: str | None = None
    others: Sequence[str] = ()
    stacks: str | None = None
    flight_recorder: str | None = None

    def lines(self) -> list[str]:
        """To be shown."""
        rank = f"{self.role} rank {self.rank}" if self.role is not None else None
        process = f"process {self.pid}" if self.pid is not None else None
        fields = [
            ("cause", self.cause),
            ("where", ", ".join(name for name in (self.host, rank, process) if name is not None)),
            ("phase", f"{self.phase}; since {_clock(self.since)}"),
            ("last line", self.last_line),
            *(("others" if number == 0 else "", line) for number, line in enumerate(self.others)),
            ("stacks", self.stacks),
            ("recorder", self.flight_recorder),
        ]
        return [f"  {name:<10} {value}" for name, value in fields if value]


def describe(
    directory: Path,
    cause: str,
    phase: str,
    *,
    role: str | None = None,
    rank: int | None = None,
    host: str | None = None,
    since: float | None = None,
    died: bool = False,
) -> FirstFailure:
    """The card of a failure, from what is in the run's directory.

    Args:
        directory: of the run.
        cause: one line.
        phase: step and phase.
        role, rank: of the rank that failed, where it was one.
        host: where it was not.
        since: when; now if None.
        died: whether the rank's process is gone, so that its log may say more.
    """
    now = time.time()
    logs = directory / LOGS
    beats = read_heartbeats(logs)
    own_beat = next((beat for beat in beats if (beat.role, beat.rank) == (role, rank)), None)
    last = None
    log = logs / f"{role}-{rank}.log"
    if died and log.exists():
        lines = [line.decode(errors="replace").strip() for line in last_lines(log, 20)]
        last = next((shortened(line, _LINE) for line in reversed(lines) if line), None)
    return FirstFailure(
        cause=cause,
        phase=phase,
        at=now,
        since=now if since is None else since,
        role=role,
        rank=rank,
        host=own_beat.host if own_beat is not None else host,
        pid=own_beat.pid if own_beat is not None else None,
        last_line=last,
        others=_together(beat for beat in beats if beat is not own_beat),
        stacks=str(logs / f"*{STACKS}") if any(logs.glob(f"*{STACKS}")) else None,
        flight_recorder=str(directory / FLIGHT_RECORDER) if (directory / FLIGHT_RECORDER).is_dir() else None,
    )


def say_card(failure: FirstFailure) -> None:
    """Print it on stderr."""
    print("\n".join(["hybridflow: first failure", *map(visible, failure.lines())]), file=sys.stderr, flush=True)


def write_failure(directory: Path, failure: FirstFailure) -> None:
    """Keep it in the run's directory. Raises OSError."""
    replace_file(directory / FAILURE, json.dumps(asdict(failure), indent=1) + "\n")


def keep_cause(directory: Path, cause: str, *, host: str | None = None) -> None:
    """Make, print and keep the card of a run whose driver is gone without having done so.

    Raises:
        OSError: it cannot be kept.
        UserError: a file of the run is damaged.
    """
    position = read_position(directory)
    card = describe(
        directory, cause, "start" if position is None else f"step {position.step}, {position.phase}", host=host
    )
    say_card(card)
    write_failure(directory, card)


def keep_earlier(directory: Path, failures: Sequence[FirstFailure]) -> None:
    """Keep in the run's directory what it failed of before it was started again, each time. Raises OSError."""
    for number, failure in enumerate(failures, 1):
        replace_file(directory / EARLIER_FAILURE.format(number), json.dumps(asdict(failure), indent=1) + "\n")


def read_earlier(directory: Path) -> list[FirstFailure]:
    """Read the failures of a run's earlier starts, in order.

    Raises:
        UserError: a file is damaged.
    """
    failures: list[FirstFailure] = []
    while (failure := read_record(directory / EARLIER_FAILURE.format(len(failures) + 1), FirstFailure)) is not None:
        failures.append(failure)
    return failures


def forget_failures(directory: Path) -> None:
    """Remove the failures in the run's directory. Raises OSError."""
    for path in (directory / FAILURE, *directory.glob(EARLIER_FAILURE.format("*"))):
        path.unlink(missing_ok=True)


def read_failure(directory: Path) -> FirstFailure | None:
    """Read the failure of a run; None if it has not failed.

    Raises:
        UserError: the file is damaged.
    """
    return read_record(directory / FAILURE, FirstFailure)


def _together(beats: Iterable[Heartbeat]) -> list[str]:
    """Return a line for ranks of a role that run the same method."""

    def at(beat: Heartbeat) -> tuple[str, str]:
        if not beat.method:
            return beat.role, "idle"
        return beat.role, beat.method if beat.has_turn else f"waiting for its turn in {beat.method}"

    lines = []
    for (role, what), group in itertools.groupby(sorted(beats, key=lambda beat: (*at(beat), beat.rank)), key=at):
        same = list(group)
        counts = [beat.completed for beat in same]
        done = f", parts done: {_span(min(counts), max(counts))}" if any(counts) and what != "idle" else ""
        hosts = list(dict.fromkeys(beat.host for beat in same))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        since = _clock(min(beat.since for beat in same))
        lines.append(f"{role} {_ranks([beat.rank for beat in same])} on {where}: {what} since {since}{done}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "0-3, 7", of ranks in their order."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return ", ".join(_span(*run) for run in runs)


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


if __name__ == "__main__":
    with contextlib.suppress(OSError, UserError):  # whoever starts this has said the cause
        if not goes_on(Path(sys.argv[1])):  # where it does, it was resumed meanwhile
            if (card := read_failure(Path(sys.argv[1]))) is not None:  # the run has kept it, and had no time to say it
                say_card(card)
            else:
                keep_cause(Path(sys.argv[1]), sys.argv[2])
