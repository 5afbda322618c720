"""Interface of every sandbox: a program, its limits, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Protocol

from pydantic import Field

from engine3d.settings import Settings

DIRECTORY = "/tmp"
"""Working directory of a program. It holds the program's files, and nothing else can be written."""


class ProgramLimits(Settings):
    """Limits of one program, all its processes together."""

    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time that it may compute or wait, in seconds. Time in which it is ready to compute and has no core does not
    count."""
    memory_mb: float = Field(default=512.0, ge=16)
    """Memory, in MB."""
    processes: int = Field(default=32, ge=1, le=4096)
    """Processes and threads."""
    files_mb: float = Field(default=64.0, gt=0)
    """Files that it writes, in MB. They are in memory, in addition to `memory_mb`."""
    output_mb: float = Field(default=1.0, gt=0)
    """Standard output, in MB, and as much of standard error."""


class Verdict(StrEnum):
    """End of a program. None is ever the machine's fault: that is a `SandboxError`."""

    EXITED = "exited"
    """It ended by itself with exit code 0."""
    FAILED = "failed"
    """It ended by itself with another exit code, or by a signal."""
    TIMEOUT = "timeout"
    """It was killed at `timeout_s`."""
    MEMORY = "memory"
    """It was killed at `memory_mb`, or ended with a MemoryError."""
    PROCESSES = "processes"
    """It was killed at `processes`, or ended because it could start no other."""
    OUTPUT = "output"
    """It was killed at `output_mb`."""


class SandboxError(Exception):
    """A program has no verdict, and the machine is at fault. The message is one line."""


def _is_word(word: str) -> bool:
    """True if the kernel can have a word of a command or a name of a file."""
    return "\0" not in word and word.encode(errors="replace").decode() == word


@dataclass(frozen=True)
class SandboxProgram:
    """A program to run.

    Args:
        command: to run, with its arguments. "python3" is the sandbox's Python.
        files: contents by path below the working directory.
        stdin: standard input.
        limits: of the program. Those of the sandbox's settings if None.

    Raises:
        ValueError: no command, a character that no command has, or a path that leads elsewhere.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    limits: ProgramLimits | None = None

    def __post_init__(self) -> None:
        if not self.command or not all(map(_is_word, (*self.command, *self.files))):
            raise ValueError(
                f"a program with the command {list(self.command)}, expected words in UTF-8 without null characters"
            )
        for name in self.files:
            path = PurePosixPath(name)
            if not path.name or path.is_absolute() or ".." in path.parts or str(path) != name:
                raise ValueError(f"a file of a program is {name!r}, expected a relative path such as 'data/input.txt'")


@dataclass(frozen=True)
class SandboxResult:
    """End of a program, with its output up to there.

    Args:
        verdict: its end.
        exit_code: as of a shell, 128 plus the number for a signal. None for a program that was killed at a limit.
        stdout, stderr: its output, `output_mb` each at most.
        seconds: time that counts as `timeout_s`, to 50 ms.
    """

    verdict: Verdict
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class Sandbox(Protocol):
    """Place where programs run. For the tasks of one event loop."""

    async def start(self) -> None:
        """Check that programs can run as the settings ask. `run` does so before its first program.

        Raises:
            UserError: they cannot. One line says what is missing.
        """

    async def run(self, program: SandboxProgram) -> SandboxResult:
        """Run a program. When this returns, none of its processes and files is left.

        Raises:
            SandboxError: the machine is at fault, never the program.
            UserError: as `start`.
        """

    async def close(self) -> None:
        """Kill the programs that run, and release connections."""


def python_program(
    source: str, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None, limits: ProgramLimits | None = None
) -> SandboxProgram:
    """A program of Python source code."""
    # A model's text may hold lone surrogates, which no file of source code can.
    encoded = source.encode(errors="replace")
    return SandboxProgram(("python3", "-B", "main.py"), {**(files or {}), "main.py": encoded}, stdin, limits)
