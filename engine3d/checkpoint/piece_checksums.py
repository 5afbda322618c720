"""The checksum of every piece in a rank's files, so that whoever reads a piece knows that it is what was saved.

Each rank writes them beside its files, as JSON: of each file the first byte, the length and the checksum of a piece.
The manifest has the checksum of that file in turn. A reader of any layout compares what it reads anyway, and nothing is
read twice.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Buffer, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.checkpoint.manifest import Hash
from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, read_json_object

_RANKS_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class PieceChecksum:
    """Of the bytes `start` to `start + length` of a file."""

    start: int
    length: int
    checksum: str


def checksum_file(rank: int) -> str:
    """The name of the file with the checksums of what a rank wrote."""
    return f"__{rank}.checksums.json"


def checksum_text(pieces: Mapping[str, Sequence[PieceChecksum]]) -> bytes:
    """What that file holds, given the pieces of each of the rank's files."""
    facts = {file: [[each.start, each.length, each.checksum] for each in found] for file, found in pieces.items()}
    return json.dumps(facts, separators=(",", ":")).encode()


class PieceChecksums:
    """The checksums of all pieces in a role's directory; of each rank's files read when the first is asked for.

    Args:
        directory: of the role. What stands in it was compared with the manifest, but for the shards.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, dict[tuple[str, int, int], str]] = {}
        self._covered: dict[str, bool] = {}
        self._lock = threading.Lock()

    def covers(self, file: str) -> bool:
        """Whether the pieces of a file have checksums: those of older versions have none."""
        if file not in self._covered:
            match = _RANKS_FILE.fullmatch(file)
            there = match is not None and (self._directory / checksum_file(int(match[1]))).is_file()
            self._covered[file] = there
        return self._covered[file]

    def of_file(self, file: str) -> list[PieceChecksum]:
        """The checksums of the pieces of a file, one that is covered, in the file's order. Raises as `compare` does."""
        pieces = self._of(file).items()
        return sorted(
            (PieceChecksum(start, length, found) for (name, start, length), found in pieces if name == file),
            key=lambda piece: piece.start,
        )

    def compare(self, file: str, start: int, data: Sequence[Buffer]) -> str | None:
        """What is wrong with a piece, in words that go on after the name of its file; None if nothing is.

        Args:
            file: the name of its file, one that is covered.
            start: its first byte there.
            data: all of its bytes, in parts.

        Raises:
            UserError: the rank's checksums cannot be read.
        """
        found = Hash()
        length = 0
        for part in data:
            found.update(part)
            length += memoryview(part).nbytes
        expected = self._of(file).get((file, start, length))
        if expected is None:
            return f"has no checksum of bytes {start:,} to {start + length:,}"
        if found.checksum() != expected:
            return f"is damaged: bytes {start:,} to {start + length:,} are not those that were saved"
        return None

    def _of(self, file: str) -> dict[tuple[str, int, int], str]:
        match = _RANKS_FILE.fullmatch(file)
        assert match is not None
        rank = int(match[1])
        with self._lock:
            if rank not in self._known:
                self._known[rank] = self._read(self._directory / checksum_file(rank))
            return self._known[rank]

    @staticmethod
    def _read(path: Path) -> dict[tuple[str, int, int], str]:
        try:
            facts = read_json_object(path, MOST_LIST_BYTES)
            return {
                (str(file), int(start), int(length)): str(checksum)
                for file, pieces in facts.items()
                for start, length, checksum in pieces
            }
        except (ValueError, TypeError, OverflowError):
            raise UserError(
                f"{path} holds no checksums of pieces, expected lists of start, length and checksum by file"
            ) from None
