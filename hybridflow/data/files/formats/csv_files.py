"""Files of CSV as record batches of texts: the spelling of a number belongs to the answer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.input_files import AS_UTF8, MOST_LINE_BYTES
from engine3d.startup.lazy_imports import pa
from hybridflow.data.files.formats.text_files import line_of_other_text

_HEADER_BYTES = 1 << 16


def batches(path: Path, name: str, delimiters: str, rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a file in UTF-8.

    Args:
        path: of the file.
        name: of it in errors.
        delimiters: characters that may separate its columns; the first one that the first line has does.
        rows: of a batch, at most.

    Raises:
        UserError: it cannot be read.
    """
    from pyarrow import csv as arrow_csv  # other formats do not need it

    parse = arrow_csv.ParseOptions(delimiter=_delimiter(path, delimiters), newlines_in_values=True)
    read = arrow_csv.ReadOptions(block_size=MOST_LINE_BYTES)  # a row has to lie in one or two of them
    try:
        with arrow_csv.open_csv(path, read_options=read, parse_options=parse) as opened:
            names = opened.schema.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{name}: column {twice!r} is named twice in the first line")
        texts = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, quoted_strings_can_be_null=False
        )
        with arrow_csv.open_csv(path, read_options=read, parse_options=parse, convert_options=texts) as opened:
            for batch in opened:
                yield from (batch.slice(begin, rows) for begin in range(0, len(batch), rows))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        if line := line_of_other_text(path):
            raise UserError(f"{name}:{line}: not text in UTF-8; {AS_UTF8}") from None
        raise UserError(f"{name}: {shortened(' '.join(str(error).split()), 200)}") from None


def _delimiter(path: Path, delimiters: str) -> str:
    with path.open("rb") as read:
        begin = read.read(_HEADER_BYTES).decode("utf-8-sig", errors="replace")
    for delimiter in delimiters:
        try:
            header = next(filter(None, csv.reader(io.StringIO(begin, newline=""), delimiter=delimiter)), [])
        except csv.Error:  # a name longer than this reader's limit
            continue
        if len(header) > 1:
            return delimiter
    return delimiters[0]
