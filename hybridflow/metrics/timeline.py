"""Timeline of the calls of each rank, which shows the roles that ran at the same time.

    from hybridflow.metrics.timeline import timeline

    timeline.write(directory / "timeline.json")    # opens in Perfetto or chrome://tracing

Every worker group reports to the one timeline of its process.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, read_json
from hybridflow.rundir.atomic_files import replace_file

_MOST_SPANS = 10_000
_LATEST = 1e11
"""The year 5138, in seconds since the epoch."""
_STEP_ENDS_WITH = "commit_weights"


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One call on one rank.

    Args:
        begin: seconds since the epoch by the clock of the rank's node, once the rank's turn had come and its inputs
            were there; waiting counts for nothing.
        end: the same clock, when the result was in host memory.
    """

    role: str
    rank: int
    method: str
    begin: float
    end: float


class Timeline:
    """The last spans that were recorded. Threads may share it.

    Args:
        most_spans: how many are kept; the oldest go.
    """

    def __init__(self, most_spans: int = _MOST_SPANS) -> None:
        self._spans: deque[TimelineSpan] = deque(maxlen=most_spans)
        self._lock = threading.Lock()

    def record(self, spans: Iterable[TimelineSpan]) -> None:
        """Add spans."""
        with self._lock:
            self._spans.extend(spans)

    def clear(self) -> None:
        """Forget all spans: another run of this process begins."""
        with self._lock:
            self._spans.clear()

    @property
    def spans(self) -> tuple[TimelineSpan, ...]:
        """Kept spans, in the order of their beginnings."""
        with self._lock:
            return tuple(sorted(self._spans, key=lambda span: span.begin))

    def write(self, path: Path) -> None:
        """Write what is kept as a file of Chrome's trace event format: a process for each role, a thread for each rank.

        Times are microseconds since the epoch. Who reads the file meanwhile finds all of it, or what it was before.
        """
        spans = self.spans
        number = {role: index for index, role in enumerate(dict.fromkeys(span.role for span in spans))}
        names = [{"name": "process_name", "ph": "M", "pid": number[role], "args": {"name": role}} for role in number]
        threads = sorted({(span.role, span.rank) for span in spans})
        names += [
            {"name": "thread_name", "ph": "M", "pid": number[role], "tid": rank, "args": {"name": f"rank {rank}"}}
            for role, rank in threads
        ]
        events = [
            {
                "name": span.method,
                "ph": "X",
                "pid": number[span.role],
                "tid": span.rank,
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
            }
            for span in spans
        ]
        replace_file(path, json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}) + "\n")


def step_ends(spans: Iterable[TimelineSpan]) -> list[float]:
    """Return the ends of steps in order: each time the first engine began to serve a version of the weights."""
    commits = [span for span in spans if span.method == _STEP_ENDS_WITH]
    first_engine = min((span.rank for span in commits), default=0)
    return sorted(span.end for span in commits if span.rank == first_engine)


def read_spans(path: Path) -> list[TimelineSpan]:
    """The spans of a file that `Timeline.write` has made, in the order of their beginnings.

    Raises:
        UserError: it is no such file.
    """
    try:
        events = read_json(path, MOST_LIST_BYTES)["traceEvents"]
        roles = {event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"}
        return [
            TimelineSpan(
                roles[event["pid"]],
                int(event["tid"]),
                str(event["name"]),
                _seconds(event["ts"]),
                _seconds(event["ts"] + event["dur"]),
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UserError(f"{path} is no timeline of a run, expected Chrome's trace event format") from None


def _seconds(microseconds: float) -> float:
    seconds = microseconds / 1e6
    if not 0 <= seconds < _LATEST:
        raise ValueError(f"{seconds} s since the epoch")
    return seconds


timeline = Timeline()
"""Timeline of this process."""
