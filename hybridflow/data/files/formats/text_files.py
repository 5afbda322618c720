"""Files of text as UTF-8: copied where they are compressed or in UTF-16, which Excel and PowerShell write."""

from __future__ import annotations

import codecs
import itertools
import lzma
from collections.abc import Iterator
from pathlib import Path

from engine3d.errors import UserError
from engine3d.startup.lazy_imports import pa

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLOCK = 1 << 24


def is_utf8(path: Path, compression: str | None) -> bool:
    """True if a file can be read where it lies: not compressed, and without the mark by which UTF-16 begins."""
    if compression is not None:
        return False
    with path.open("rb") as read:
        return read.read(2) not in _UTF16


def copy_as_utf8(path: Path, copy: Path, compression: str | None, name: str) -> None:
    """Write the text of a file.

    Args:
        path: of the file.
        copy: of the text.
        compression: as pyarrow names it, or "xz"; None if it has none.
        name: of the file in errors.

    Raises:
        UserError: the file is damaged.
    """
    with copy.open("wb") as written:
        for block in _in_utf8(_blocks(path, compression, name), name):
            written.write(block)


def line_of_other_text(path: Path) -> int | None:
    """Number, from 1, of the first line that is not in UTF-8; None if there is none."""
    with path.open("rb") as read:
        for number, line in enumerate(read, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return None


def _blocks(path: Path, compression: str | None, name: str) -> Iterator[bytes]:
    try:
        # Arrow has no xz; what fsspec has for zstd takes half of a file for all of it.
        is_xz = compression == "xz"
        with lzma.open(path) if is_xz else pa.input_stream(str(path), compression=compression) as read:
            while block := read.read(_BLOCK):
                yield block
    except (OSError, EOFError, pa.ArrowException, lzma.LZMAError) as error:
        raise UserError(f"{name}: cannot be uncompressed: {error}") from None


def _in_utf8(blocks: Iterator[bytes], name: str) -> Iterator[bytes]:
    first = next(blocks, b"")
    if not first.startswith(_UTF16):
        yield first
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder("utf-16")()
    try:
        for block in itertools.chain([first], blocks):
            yield decoder.decode(block).encode("utf-8")
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise UserError(f"{name}: begins as text in UTF-16 and cannot be read as such: {error}") from None
