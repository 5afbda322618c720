"""Logger of a run, and the form of its lines.

    from hybridflow.errors.log import log
    log.warning("%s could not be removed", path)

Progress (INFO) goes to standard output as it is; warnings and errors to standard error, after `hybridflow: `. A program
that uses `hybridflow` as a library changes that by `logging.getLogger("hybridflow")`: its level, handlers in place of
this one, or `propagate`. HYBRIDFLOW_LOG_LEVEL (DEBUG, INFO, WARNING or ERROR) sets the level from outside.
"""

from __future__ import annotations

import logging
import os
import sys

LEVEL = "HYBRIDFLOW_LOG_LEVEL"
"""Environment variable with the least level that is logged."""

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _Lines(logging.Handler):
    """Writes to what standard output and standard error are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            print(f"hybridflow: {line}", file=sys.stderr, flush=True)
        else:
            print(line, flush=True)


log = logging.getLogger("hybridflow")


def set_level(level: str | None) -> None:
    """Log from this level on; INFO if it is None, or none of the four, which is reported."""
    name = (level or "INFO").upper()
    log.setLevel(name if name in _LEVELS else "INFO")
    if name not in _LEVELS:
        log.warning(f"{LEVEL}={level}: expected one of {', '.join(_LEVELS)}; INFO is taken")


if not log.handlers:
    log.addHandler(_Lines())
    log.propagate = False
    set_level(os.environ.get(LEVEL))
