"""Files of a source as rows: what has to be turned into another form for that is kept in the cache."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.checkpoint.manifest import checksum
from engine3d.durable import bring_to_disk
from engine3d.errors import UserError, shortened
from engine3d.input_files import FileError, check_regular
from engine3d.startup.lazy_imports import pa
from hybridflow.data.files import csv_files
from hybridflow.data.files.columns import SAMPLE_ROWS, Columns
from hybridflow.data.files.config import COMPRESSED, SUFFIXES, FileSource, Format
from hybridflow.data.files.json_files import is_lines, write_lines
from hybridflow.data.files.rows import ArrowRows, Concatenated, JsonLines, Rows
from hybridflow.data.files.text_files import copy_as_utf8, is_utf8

_WILD = re.compile(r"[*?\[]")
_BATCH_ROWS = 4096
_SETTLED_NS = 2_000_000_000
"""A file that was written a shorter time ago may be written again without another time of change."""
_VERSION_OF_REMOTE = ("size", "ETag", "etag", "Content-MD5", "LastModified", "last_modified", "mtime", "generation")
"""What file systems say of a file that changes with what it holds."""


@dataclass(frozen=True)
class DataFile:
    """One file of a source.

    Args:
        path: of it, or its address.
        format: of its rows.
        identity: a checksum of its bytes.
        local: where it can be read on this machine.
        split: of a saved data set.
    """

    path: str
    format: Format
    identity: str
    local: Path
    split: str | None = None

    @property
    def compression(self) -> str | None:
        """How its text is compressed, by its name."""
        return next((kind for suffix, kind in COMPRESSED.items() if self.path.lower().endswith(suffix)), None)

    @property
    def reading(self) -> str:
        """How its bytes become rows: with these, what the cache keeps of it is named by this."""
        return f"{self.format} {self.delimiters if self.format == 'csv' else ''} {self.compression or ''}"

    @property
    def delimiters(self) -> str:
        """Characters that may separate its columns, as CSV; the likeliest first."""
        return "\t,;" if _without_compression(self.path).endswith(".tsv") else ",;\t"


def default_cache() -> Path:
    """Where files are kept as this system reads them."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hybridflow" / "data"


def files_of(source: FileSource, cache: Path) -> tuple[DataFile, ...]:
    """The files of a source; those of other file systems are copied into the cache.

    Raises:
        UserError: there is none, or one of no known format.
    """
    return tuple(_data_file(path, source, cache) for given in source.path for path in _expanded(given))


def open_rows(files: Sequence[DataFile], cache: Path) -> Rows:
    """All rows of some files, in order.

    Raises:
        UserError: naming the file that cannot be read, or has no rows.
    """
    parts = [_open(file, cache) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.in_columns != parts[0].in_columns:
            raise UserError(
                f"{file.path} beside {files[0].path}: {file.format} and {files[0].format} in one source, and one of "
                "them has the same columns in every row; expected a source for each"
            )
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def _expanded(given: str) -> list[str]:
    if "://" in given:
        if not _WILD.search(given) or given.startswith(("http://", "https://")):  # where "?" begins a query
            return [given]
        filesystem, path = _remote(given)
        found = [filesystem.unstrip_protocol(each) for each in sorted(_asked(given, lambda: filesystem.glob(path)))]
    elif not _WILD.search(given) or os.path.lexists(given):
        return [given]
    else:
        found = sorted(glob.glob(given))  # noqa: PTH207 - a pattern that may be absolute
    if not found:
        raise UserError(f"{given}: no file has such a name")
    return found


def _remote(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:  # a library that is not installed, an unknown scheme
        raise UserError(f"{address}: {shortened(' '.join(str(error).split()), 200)}") from None
    return filesystem, str(path)


def _data_file(path: str, source: FileSource, cache: Path) -> DataFile:
    format = source.format or _format(path)
    if "://" in path:
        if format == "dataset":
            raise UserError(f"{path}: a saved data set on another file system, expected it on this machine")
        local = _fetched(path, cache)
    else:
        local = Path(path)
    if format == "dataset":
        return DataFile(path, format, _directory_identity(local, cache), local, source.split)
    try:
        check_regular(local)
    except FileError as error:
        raise UserError(f"cannot read rows from {error}") from None
    if source.split is not None:
        raise UserError(f"{path}: a file with split={source.split}, expected it of a saved data set alone")
    return DataFile(path, format, _checksum(local, cache), local)


def _format(path: str) -> Format:
    if "://" not in path and os.path.isdir(path):  # noqa: PTH112 - of a name that cannot be one it is false
        return "dataset"
    name = _without_compression(path)
    if found := next((format for suffix, format in SUFFIXES.items() if name.endswith(suffix)), None):
        return found
    raise UserError(
        f"{path}: the name does not say the format; expected one of {', '.join(SUFFIXES)}, or format= of the source"
    )


def _without_compression(path: str) -> str:
    name = path.lower()
    suffix = next((each for each in COMPRESSED if name.endswith(each)), "")
    return name.removesuffix(suffix)


def _directory_identity(directory: Path, cache: Path) -> str:
    """Of a saved data set: of the names and bytes of its files."""
    if not (directory / "dataset_info.json").exists() and not (directory / "dataset_dict.json").exists():
        raise UserError(f"{directory}: no data set that `datasets` has saved, expected dataset_info.json in it")
    state = hashlib.sha256()
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        state.update(f"{path.relative_to(directory)}\0{_checksum(path, cache)}\0".encode())
    return f"sha256:{state.hexdigest()}"


def _checksum(path: Path, cache: Path) -> str:
    """Of a file's bytes; kept in the cache for as long as its size, times and place do not change."""
    facts = path.stat()
    known = f"{path}\0{facts.st_dev}\0{facts.st_ino}\0{facts.st_size}\0{facts.st_mtime_ns}\0{facts.st_ctime_ns}"
    kept = cache / "checksums" / hashlib.sha256(known.encode()).hexdigest()
    try:
        return kept.read_text().strip()
    except OSError:
        found = checksum(path)
    if time.time_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) > _SETTLED_NS:
        write_once(kept, lambda part: _write_text(part, found))
    return found


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _fetched(address: str, cache: Path) -> Path:
    """A copy of a file of another file system, as it is there now."""
    filesystem, path = _remote(address)
    facts = _asked(address, lambda: filesystem.info(path))
    if facts.get("type") == "directory":
        raise UserError(f"{address}: a directory, expected a file; or a pattern of files, such as {address}/*.parquet")
    version = [_asked(address, lambda: filesystem.ukey(path)), *(str(facts.get(name)) for name in _VERSION_OF_REMOTE)]
    name = hashlib.sha256("\0".join((address, *map(str, version))).encode()).hexdigest()[:32]
    kept = cache / "fetched" / f"{name}-{Path(path).name[-60:]}"
    return write_once(kept, lambda part: _asked(address, lambda: filesystem.get_file(path, str(part))))


def _asked[T](address: str, ask: Callable[[], T]) -> T:
    """What a file system answers. Raises UserError for whatever its library raises."""
    try:
        return ask()
    except FileNotFoundError:
        raise UserError(f"{address}: no such file") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{address}: cannot be read: {shortened(reason, 200)}") from None


def write_once(path: Path, write: Callable[[Path], None]) -> Path:
    """A file or directory of the cache, made under another name first if it is not there: whole, or not at all.

    Raises:
        UserError: the cache cannot be written.
    """
    if path.exists():
        return path
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        _flush(part)  # else its name may be on the disk before what it holds
        part.rename(path)
    except OSError as error:
        if not path.exists():  # or another process was first
            raise UserError(f"data.files.cache: cannot write {path}: {error.strerror or error}") from None
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            with suppress(OSError):  # where it could not be written
                part.unlink()
    return path


def _flush(part: Path) -> None:
    """Bring a file, or those of a directory, to the disk."""
    for path in part.iterdir() if part.is_dir() else (part,):
        bring_to_disk(path)


def _open(file: DataFile, cache: Path) -> Rows:
    kept = cache / "rows" / hashlib.sha256(f"{file.reading}\0{file.identity}".encode()).hexdigest()[:32]
    if file.format == "dataset":
        return _saved_dataset(file)
    if file.format in ("jsonl", "json"):
        text = file.local
        if not is_utf8(file.local, file.compression):
            text = write_once(kept, lambda part: _copy(file, part))
        if is_lines(text, file.format):
            return JsonLines(text, file.path)
        listed = kept.with_name(f"{kept.name}-list")
        return JsonLines(write_once(listed, lambda part: write_lines(text, part, file.path)), file.path, is_list=True)
    if file.format == "arrow" and not _is_compressed(file):
        return ArrowRows(list(_from_arrow(file.local, file.path)), file.path)
    read = {"arrow": _from_compressed_arrow, "csv": _from_csv, "parquet": _from_parquet}[file.format]
    return ArrowRows(list(_from_arrow(write_once(kept, lambda part: read(file, part)), file.path)), file.path)


def _copy(file: DataFile, part: Path) -> None:
    copy_as_utf8(file.local, part, file.compression, file.path)


@contextmanager
def _text(file: DataFile, part: Path) -> Iterator[Path]:
    """A file with the text in UTF-8: where it lies, or a copy beside `part` for as long as it is read."""
    if is_utf8(file.local, file.compression):
        yield file.local
        return
    copy = part.with_name(f"{part.name}.text")
    try:
        _copy(file, copy)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _from_arrow(path: Path, name: str) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file, in its file or its stream format, mapped into memory."""
    try:
        source = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
        else:
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name}: not an Arrow file ({_reason(error)})") from None


def _is_compressed(file: DataFile) -> bool:
    """Whether batches of an Arrow file take memory of their own, as those of compressed ones do."""
    before = pa.total_allocated_bytes()
    batch = next((each for each in _from_arrow(file.local, file.path) if len(each)), None)
    return batch is not None and pa.total_allocated_bytes() - before > batch.nbytes // 2


def _from_compressed_arrow(file: DataFile, part: Path) -> None:
    _write_batches(file, part, _from_arrow(file.local, file.path))


def _from_parquet(file: DataFile, part: Path) -> None:
    _write_batches(file, part, _parquet_batches(file))


def _parquet_batches(file: DataFile) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.local, memory_map=True) as read:
            for group in range(
                read.num_row_groups
            ):  # those of several cannot be one batch where dictionaries are nested
                yield from read.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: cannot be read as Parquet ({_reason(error)})") from None


def _write_batches(file: DataFile, path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """As a stream, in which every batch may have dictionaries of its own."""
    if (first := next(batches, None)) is None:
        raise UserError(f"{file.path} holds no rows")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _from_csv(file: DataFile, part: Path) -> None:
    with _text(file, part) as path:
        _write_batches(file, part, csv_files.batches(path, file.path, file.delimiters, _BATCH_ROWS))


def _reason(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()), 200)


class _SavedRows:
    """Rows of a saved data set, in the order that it has."""

    in_columns = True

    def __init__(self, dataset: Any, name: str) -> None:
        if not len(dataset):
            raise UserError(f"{name} holds no rows")
        as_arrow = dataset.with_format("arrow")[:SAMPLE_ROWS]  # in which pictures and sounds are bytes
        self._columns = Columns.of(dataset.features.arrow_schema, as_arrow.column)
        self.columns, self.left_out = self._columns.names, self._columns.left_out
        self._dataset, self._name = dataset.select_columns(list(self.columns)).with_format(None), name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.read(number, number + 1)[0]

    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        try:
            columns = self._dataset[begin:end]
        except (ValueError, OverflowError, pa.ArrowException) as error:
            if end - begin > 1:
                return [row for number in range(begin, end) for row in self.read(number, number + 1)]
            raise UserError(f"{self.place(begin)}: {_reason(error)}") from None
        return [
            self._columns.row(
                {name: columns[name][number - begin] for name in columns},
                lambda number=number: self.place(number),  # type: ignore[misc]
            )
            for number in range(begin, end)
        ]

    def place(self, number: int) -> str:
        return f"{self._name}, row {number}"


def _saved_dataset(file: DataFile) -> Rows:
    import datasets  # takes a second

    try:
        found = datasets.load_from_disk(str(file.local))
    except Exception as error:  # whatever the library comes upon in its files
        raise UserError(f"{file.path}: {shortened(' '.join(str(error).split()), 200)}") from None
    if isinstance(found, datasets.DatasetDict):
        if file.split not in found:
            given = "no split" if file.split is None else f"split={file.split}"
            raise UserError(f"{file.path}: {given}, expected one of {', '.join(found)}")
        found = found[file.split]
    elif file.split is not None:
        raise UserError(f"{file.path}: a data set without splits, with split={file.split}; expected none")
    return _SavedRows(found, file.path)
