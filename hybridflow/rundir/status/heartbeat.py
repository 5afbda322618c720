"""Heartbeats of a rank, in a file next to its log: `ROLE-RANK.heartbeat`, one JSON object.

It is read on the rank's own host, whose clock its times are of; what it said last stays when the rank is gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import JsonError, open_regular, parse_json
from engine3d.json_records import EpochSeconds, record_of

BEAT_S = 1.0
"""Between two heartbeats of a rank."""
_SUFFIX = ".heartbeat"
_BYTES = 1024
"""Constant size of the file: a full disk does not prevent that it is overwritten."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of a rank.

    Args:
        role, rank: whose it is.
        host: name of its host.
        pid: of its process.
        method: that it runs; "" for none.
        has_turn: whether it computes; not while it waits for other groups on its devices.
        since: when it began to, or to be idle. Like all times in seconds since the epoch, by the clock of its host.
        completed: units of the method's work, such as micro-batches.
        progressed: when the last one was done, or the method began.
        usual_s: the longest time without one in earlier calls of the method; None in the first call.
        counts: true if the method has such units.
        at: when it said so.
        done, total, unit: of what a call counts, such as responses; total is 0 where it is not known.
    """

    role: str
    rank: int
    host: str
    pid: int
    method: str
    has_turn: bool
    since: EpochSeconds
    completed: int
    progressed: EpochSeconds
    usual_s: float | None
    counts: bool
    at: EpochSeconds
    done: int = 0
    total: int = 0
    unit: str = ""

    @property
    def is_at_work(self) -> bool:
        """True if it runs a method and has its turn."""
        return bool(self.method) and self.has_turn


def heartbeat_path(log_path: Path) -> Path:
    """Return the heartbeat file of the rank that writes a log."""
    return log_path.with_suffix(_SUFFIX)


class HeartbeatFile:
    """The file, for its rank.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, beat: Heartbeat) -> None:
        """Replace what it holds. Raises OSError."""
        os.pwrite(self._descriptor, json.dumps(asdict(beat)).ljust(_BYTES - 1).encode() + b"\n", 0)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read the last heartbeat of a rank; None if there is none that can be read."""
    try:
        descriptor = open_regular(path)
        try:
            return record_of(Heartbeat, parse_json(os.pread(descriptor, _BYTES, 0)))
        finally:
            os.close(descriptor)
    except (OSError, UserError, JsonError):
        return None


def forget_heartbeats(directory: Path) -> None:
    """Remove those of an earlier start of a run, whose ranks may have been others."""
    for path in directory.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)


def read_heartbeats(directory: Path) -> list[Heartbeat]:
    """Read the last heartbeats of all ranks that log into a directory, by role and rank."""
    beats = [beat for path in directory.glob(f"*{_SUFFIX}") if (beat := read_heartbeat(path)) is not None]
    return sorted(beats, key=lambda beat: (beat.role, beat.rank))
