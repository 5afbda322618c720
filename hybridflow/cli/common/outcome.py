"""The output of a command and its end: its standard streams, its exit code, and the first failure.

Standard output and error may be full or closed, which ends no training and makes no traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Buffer, Callable
from pathlib import Path

from engine3d.errors import EngineError, UserError, shortened, visible
from hybridflow.cluster.driver_link import lost_host, tell_failure
from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.rank_failure import Failure
from hybridflow.rundir.status.first_failure import describe, say_card, write_failure
from hybridflow.rundir.status.progress import where_now
from hybridflow.workers.failure_diagnosis import Kind, kind_of

_PREFIX = "hybridflow: "
OF_THE_SURROUNDINGS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG, errno.EMFILE, errno.ENFILE}
    | {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOMEM}
)
"""Errors of the system that say enough with the name of the file: nothing of this program is wrong."""


class LastWords:
    """The first failure of this process's command: to people, to the run's directory and to the supervisor."""

    def __init__(self) -> None:
        self._cause: tuple[str, Failure | None] | None = None
        self.directory: Path | None = None
        """Directory of the run, once it has begun."""

    def note(self, text: str, failure: Failure | None = None) -> None:
        """Keep what the command failed of, if nothing was kept before.

        Args:
            text: that is said; its first line is the cause.
            failure: of a rank, where it was one.
        """
        if self._cause is None and text.startswith(_PREFIX):
            self._cause = text.splitlines()[0].removeprefix(_PREFIX), failure

    def say(self) -> None:
        """The card of the failure, once, if there was one."""
        if self._cause is None:
            return
        (line, failure), self._cause = self._cause, None
        tell_failure(where_now().partition(",")[0], line)
        if self.directory is None:
            return
        from hybridflow.cluster.ray.node_actors import copy_logs  # here: most commands need no Ray

        copy_logs()
        # The cause is on stderr already: what keeps the card from being made hides nothing.
        with contextlib.suppress(OSError, ValueError):
            card = describe(
                self.directory,
                line,
                where_now(),
                role=failure.role if failure is not None else None,
                rank=failure.rank if failure is not None else None,
                host=lost_host(),
                since=failure.time if failure is not None else None,
                died=failure is not None and kind_of(failure) == Kind.DIED,
            )
            say_card(card)
            write_failure(self.directory, card)


last_words = LastWords()
"""The last words of this process."""


def guarded(work: Callable[[], int]) -> int:
    """Do what takes its time: a failure in it is reported and makes the exit code 1."""
    try:
        return work()
    except UserError:
        raise
    except EngineError as error:
        return fail(error, 1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_SURROUNDINGS:
            return say(f"hybridflow: {system_error_text(error)}", 1)
        return say(f"hybridflow: internal error: {_one_line(error)}\n{traceback.format_exc()}", 1)


def fail(error: UserError | EngineError, code: int) -> int:
    """Print an error's lines, one each, and where a rank reported it, that rank's stack below."""
    failure = getattr(error, "failure", None)
    stack = f"\n{failure.stack}".rstrip() if failure and isinstance(error, EngineError) else ""
    lines = [*(f"hybridflow: {line}" for line in str(error).splitlines()), *getattr(error, "__notes__", ())]
    return say("\n".join(lines) + stack, code, failure)


def say(text: str, code: int, failure: Failure | None = None) -> int:
    """Print what a command ends with on stderr, unless it ends by a signal; the exit code.

    Args:
        text: that is said.
        code: the exit code.
        failure: of a rank, where it was one.
    """
    if termination.cause is None:  # by which all else came about
        if code == 1:
            last_words.note(text, failure)
        print(visible(text), file=sys.stderr, flush=True)
    return code


def system_error_text(error: OSError) -> str:
    """An error of the system with the name of the file, or of both where one becomes the other."""
    names = [shortened(os.fsdecode(name), 200) for name in (error.filename, error.filename2) if name is not None]
    return f"{' to '.join(names) or 'the operating system'}: {error.strerror}"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return system_error_text(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


class PatientFile(io.RawIOBase):
    """A descriptor for writing. What it does not take is dropped, and the next write tries again.

    Args:
        descriptor: stays open.
        on_failure: called with the first error.
    """

    def __init__(self, descriptor: int, on_failure: Callable[[OSError], None] | None = None) -> None:
        super().__init__()
        self._descriptor, self._on_failure = descriptor, on_failure
        self.error: OSError | None = None
        """The first one."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if self.error is None:
                self.error = error
                if self._on_failure is not None:
                    self._on_failure(error)
        return memoryview(data).nbytes


def be_patient(on_failure: Callable[[OSError], None] | None = None) -> PatientFile | None:
    """Replace standard output and error of this process by `PatientFile`, and open closed standard descriptors.

    Where one is closed, the next file that is opened would get its number, and the output of whoever has that.

    Args:
        on_failure: called with the first error of standard output.

    Returns:
        That of standard output; None where something else has taken its place, which is then left alone.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0)  # noqa: SIM115
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(PatientFile(2), sys.stderr)
    if sys.stdout is not sys.__stdout__:
        return None
    file = PatientFile(1, on_failure)
    sys.stdout = _stream(file, sys.stdout)
    return file


def _stream(file: PatientFile, replaced: io.TextIOWrapper | None) -> io.TextIOWrapper:
    if replaced is not None:
        with contextlib.suppress(OSError, ValueError):
            replaced.flush()
    # Names of files need not be text in the terminal's encoding.
    encoding = None if replaced is None else replaced.encoding
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=True)
