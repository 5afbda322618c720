"""Failures in an engine's log, and the line of it that gives the cause of the engine's death."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

from engine3d.out_of_memory import in_short

_TAIL_BYTES = 1 << 20
_MAX_LENGTH = 400

# The last line of a Python traceback: an exception's name, dotted or not, and mostly its message.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout)\b(?::.*)?$")
_CRASH = re.compile(
    r"Subprocess .* crashed\b|Segmentation fault|Out of memory|\[torch_memory_saver\.cpp\] cudaError|terminate called"
    r"|Fatal Python error|ERROR: +\[Errno \d+\]"
)
_KILLED = re.compile(
    r"crashed with exit code -|Subprocess .* crashed$|Segmentation fault|Out of memory"
    r"|\[torch_memory_saver\.cpp\] cudaError|terminate called"
)
# What other processes say when one has failed.
_CONSEQUENCE = re.compile(
    r"^(?:EOFError|BrokenPipeError|ConnectionResetError|KeyboardInterrupt|SystemExit)\b|see the error messages"
    r"|gloo.*Connection (?:closed|reset) by peer|remote process exited or there was a network error"
)
_LOST_NEIGHBOUR = re.compile(r"gloo.*Connection|NCCL|remote process exited|DistNetworkError", re.IGNORECASE)


def temporary_log(kind: str) -> Path:
    """Make an empty log in the temporary directory; `kind` begins its name."""
    descriptor, name = tempfile.mkstemp(prefix=f"{kind}-", suffix=".log")
    os.close(descriptor)  # processes of the engine open it by its name
    return Path(name)


def log_answered() -> None:
    """Print the exception that is handled and reported to the client, so that it is no `root_cause` of a death."""
    print(textwrap.indent(traceback.format_exc(), "  "), file=sys.stderr, flush=True)


def root_cause(log_path: Path) -> str:
    """The first exception in a log's last megabyte that is not the consequence of another; "" where there is none."""
    lines = _last_lines(log_path)
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    causes = [line for line in exceptions if not _CONSEQUENCE.search(line)]
    crashes = [line for line in lines if _CRASH.search(line)]
    for lines_of_kind in (causes, crashes, exceptions):
        if lines_of_kind:
            return _shown(lines_of_kind[0])
    return ""


def describe_death(exit_code: int, log_path: Path) -> str:
    """Describe the death of a process: its exit code, and the cause in its log."""
    ended = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with {exit_code}"
    cause = root_cause(log_path)
    return f"its process {ended}{cause and f' after: {cause}'}; log: {log_path}"


def lost_neighbour(log_path: Path) -> str:
    """The first exception that says that another process is gone; "" where there is none, or one that says more."""
    lines = _last_lines(log_path)
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    if any(_KILLED.search(line) for line in lines) or any(not _CONSEQUENCE.search(line) for line in exceptions):
        return ""
    return next((_shown(line) for line in exceptions if _LOST_NEIGHBOUR.search(line)), "")


def _last_lines(log_path: Path) -> list[str]:
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _shown(line: str) -> str:
    return in_short(line.strip())[:_MAX_LENGTH]
