"""Standard output and error that may be full or closed, which ends no training and makes no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Buffer, Callable


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
    """Let this process write its standard output and error through `PatientFile`, and have all three descriptors.

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
