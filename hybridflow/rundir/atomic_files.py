"""Text files of whole lines, which a kill leaves whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine3d.durable import naming
from engine3d.input_files import lines


class AppendedFile:
    """A text file to which lines are added, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def add(self, lines: str) -> None:
        """Raises OSError where the lines could not be written; the file then ends where it did."""
        end = self.size
        rest = memoryview(lines.encode())
        try:
            with naming(self._path):
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def replace_file(path: Path, text: str) -> None:
    """Write a whole file at once: a kill leaves the old one or the new one."""
    scratch = path.with_name(path.name + ".new")
    with naming(path):
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")  # half characters that JSON can hold
    os.replace(scratch, path)  # noqa: PTH105


def whole_lines(path: Path) -> Iterator[str]:
    """The lines of a file, without their ends and without one that a kill left half written.

    Raises:
        UserError: it cannot be read, is no regular file, or has a line that is too long.
    """
    return (line for line, complete in lines(path, errors="replace") if complete)
