"""A process of a user's code under `supervisor.py`, and the sockets to both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.processes import function_process, supervisor

_KILL_TIMEOUT_S = 10.0
_LAST_WORD_S = 2.0
_LONGEST_REASON = 1000
# What a program needs to find its interpreter, libraries, language and temporary files. The marker
# identifies the processes of a run.
_ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|CUDA_VISIBLE_DEVICES|HYBRIDFLOW_RAY"
)


class SupervisedProcess:
    """Starts the process. Only one thread at a time may call it.

    Args:
        limits: of its resources, its `name` and `output_lines`, as `supervisor.py` reads them.
        environment: names of environment variables that it sees besides the usual ones.
    """

    def __init__(self, limits: Mapping[str, Any], environment: Sequence[str] = ()) -> None:
        self.connection, connection = socket.socketpair()
        """Socket to the process: messages of `function_process`."""
        self._lifeline, lifeline = socket.socketpair()
        self._open = True
        passed = [connection.fileno(), lifeline.fileno()]
        arguments = [*map(str, [*passed, os.getpid()]), json.dumps(limits)]
        with connection, lifeline:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the code prints must not mix with the output of the run
                pass_fds=passed,
                start_new_session=True,
                env=_environment(environment),
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def cut_lifeline(self) -> None:
        """Tell the supervisor to kill the process and whatever it started."""
        if self._open:
            self._lifeline.close()
            self._open = False

    def end(self) -> None:
        """Kill the process and whatever it started, and wait for its end."""
        self.connection.close()
        self.cut_lifeline()
        self._process.wait(timeout=_KILL_TIMEOUT_S)

    def death(self) -> str:
        """Kill what is left of a process that does not answer any more. Returns why it does not, in words."""
        reason = self._last_word()
        self.end()
        if reason:
            return f"{reason} and was killed"
        code = self._process.returncode
        if code == function_process.LOST_CONNECTION:
            return "closed a file descriptor that it had not opened, the one for its answers,"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def lost_connection(self) -> bool:
        """True if the process ended since its code had closed the connection."""
        return self._process.returncode == function_process.LOST_CONNECTION

    def _last_word(self) -> str:
        """Reason for which the supervisor has killed the process; empty if it has not."""
        if not self._open:
            return ""
        self._lifeline.settimeout(_LAST_WORD_S)
        with contextlib.suppress(OSError):
            return in_words(self._lifeline.recv(_LONGEST_REASON).decode(errors="replace"))
        return ""


def import_setup(path: str, arguments: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """First message to a process: what it imports, and from where.

    Args:
        path: of a function or class.
        arguments: of it.
        directory: of relative paths. It replaces no module but the one that the function is in.
    """
    sys_path = [*(entry for entry in sys.path if entry not in ("", directory)), directory]
    return {"path": path, "arguments": dict(arguments), "sys_path": sys_path, "directory": directory}


def _environment(names: Sequence[str]) -> dict[str, str]:
    """Environment variables that a process sees: the usual ones, and those of these names."""
    return {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name) or name in names}


def in_words(reason: object) -> str:
    """Flatten a process's words to one line of bounded length without control characters."""
    text = " ".join(str(reason).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
