"""Runs `hybridflow` commands as processes with limits, and says what became of each: the harness for bad input.

    with Commands(directory) as commands:
        outcome = commands.run(["check", "recipe.yaml"], directory)

A command is a process of its own, forked from one that has imported the stack, so that dozens of them take seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
MAY_MOUNT = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode == 0
"""True if this machine lets a process have mounts of its own."""
_PROGRAM = (str(Path(sys.executable).with_name("hybridflow")),)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command.

    Args:
        code: exit code; negative for the signal that ended it.
        killed: whether it was killed because its time was over.
        seconds: wall time.
        cpu_seconds: of the command and of the processes that it waited for.
        peak_bytes: resident memory of the largest of its processes, with the libraries (about 0.55 GB).
        left_over: command lines of processes that it left running.
    """

    code: int
    killed: bool
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    left_over: tuple[str, ...]
    out: str
    err: str


class Commands:
    """The process that commands are forked from.

    Args:
        scratch: a directory for what commands print.
    """

    def __init__(self, scratch: Path) -> None:
        self._out, self._err = scratch / "out", scratch / "err"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.command_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        words: Sequence[object],
        directory: Path,
        *,
        stdout: Literal["kept", "closed", "full"] = "kept",
        environment: Mapping[str, str] | None = None,
        mounts: Mapping[str, str] | None = None,
        open_files: int | None = None,
        imported: bool = True,
        kill_after_s: float = 20.0,
    ) -> Outcome:
        """Run `hybridflow WORDS...` in a directory.

        Args:
            words: arguments.
            directory: working directory.
            stdout: where standard output goes: kept, closed, or a device that is full.
            environment: variables to set.
            mounts: directories to be "full" or "read-only" for it alone, whether or not there is something in them.
            open_files: limit of open files.
            imported: whether the process begins with the stack imported; otherwise it is the installed program.
            kill_after_s: wall time after which it is killed.
        """
        self._out.unlink(missing_ok=True)
        answer = self._ask(
            {
                "program": None if imported else _PROGRAM,
                "arguments": [str(word) for word in words],
                "directory": str(directory),
                "environment": dict(environment or {}),
                "stdout": {"kept": str(self._out), "closed": None, "full": "/dev/full"}[stdout],
                "mounts": dict(mounts or {}),
                "open_files": open_files,
                "kill_after_s": kill_after_s,
            }
        )
        out = self._out.read_text(errors="replace") if self._out.exists() else ""
        return Outcome(**answer, out=out, err=self._err.read_text(errors="replace"))

    def call(self, function: str, *arguments: object) -> None:
        """Call "module:function" with arguments that JSON holds, in a process that has the stack imported.

        Raises:
            AssertionError: it raised; with its traceback.
        """
        request = {
            "function": function,
            "arguments": arguments,
            "directory": str(ROOT),
            "environment": {},
            "mounts": {},
        }
        answer = self._ask(request | {"stdout": str(self._out), "open_files": None, "kill_after_s": 60.0})
        assert answer["code"] == 0, f"{function}: {self._err.read_text()}"

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request | {"stderr": str(self._err)}) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=10)

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
