"""Checksums of every chunk in a rank's files. A reader of a chunk compares it with what was saved.

Each rank writes them next to its files, as JSON: of each file the first byte, the length and the checksum of a chunk.
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
class ChunkChecksum:
    """Checksum of the bytes `start` to `start + length` of a file."""

    start: int
    length: int
    checksum: str


def checksum_file(rank: int) -> str:
    """The name of the file with the checksums of what a rank wrote."""
    return f"__{rank}.checksums.json"


def checksum_text(chunks: Mapping[str, Sequence[ChunkChecksum]]) -> bytes:
    """Serialise that file, given the chunks of each of the rank's files."""
    entries = {
        file: [[chunk.start, chunk.length, chunk.checksum] for chunk in of_file] for file, of_file in chunks.items()
    }
    return json.dumps(entries, separators=(",", ":")).encode()


class ChunkChecksums:
    """Checksums of all chunks in a role's directory. Those of a rank are read when the first is requested.

    Args:
        directory: of the role. What stands in it was compared with the manifest, but for the shards.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, dict[tuple[str, int, int], str]] = {}
        self._covered: dict[str, bool] = {}
        self._lock = threading.Lock()

    def covers(self, file: str) -> bool:
        """True if the chunks of a file have checksums. Older formats have none."""
        if file not in self._covered:
            match = _RANKS_FILE.fullmatch(file)
            there = match is not None and (self._directory / checksum_file(int(match[1]))).is_file()
            self._covered[file] = there
        return self._covered[file]

    def of_file(self, file: str) -> list[ChunkChecksum]:
        """The checksums of the chunks of a covered file, in the file's order. Raises as `compare` does."""
        chunks = self._of(file).items()
        return sorted(
            (ChunkChecksum(start, length, checksum) for (name, start, length), checksum in chunks if name == file),
            key=lambda chunk: chunk.start,
        )

    def compare(self, file: str, start: int, data: Sequence[Buffer]) -> str | None:
        """Compare a chunk with its checksum. Returns what is wrong, in words that continue after the name of its file,
        or None.

        Args:
            file: the name of its file, one that is covered.
            start: its first byte there.
            data: all of its bytes, in blocks.

        Raises:
            UserError: the rank's checksums cannot be read.
        """
        computed = Hash()
        length = 0
        for block in data:
            computed.update(block)
            length += memoryview(block).nbytes
        expected = self._of(file).get((file, start, length))
        if expected is None:
            return f"has no checksum of bytes {start:,} to {start + length:,}"
        if computed.checksum() != expected:
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
            entries = read_json_object(path, MOST_LIST_BYTES)
            return {
                (str(file), int(start), int(length)): str(checksum)
                for file, chunks in entries.items()
                for start, length, checksum in chunks
            }
        except (ValueError, TypeError, OverflowError):
            raise UserError(
                f"{path} holds no checksums of chunks, expected lists of start, length and checksum by file"
            ) from None
