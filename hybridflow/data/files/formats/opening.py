"""Files of a source as rows. Converted forms of them are kept in the cache."""

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
from hybridflow.data.files.config import COMPRESSED, SUFFIXES, FileSource, Format
from hybridflow.data.files.formats import csv_files
from hybridflow.data.files.formats.columns import SAMPLE_ROWS, TableColumns
from hybridflow.data.files.formats.json_files import is_lines, write_lines
from hybridflow.data.files.formats.rows import ArrowRows, Concatenated, JsonLines, Rows
from hybridflow.data.files.formats.text_files import copy_as_utf8, is_utf8

_WILD = re.compile(r"[*?\[]")
_BATCH_ROWS = 4096
_SETTLED_NS = 2_000_000_000
"""Age from which a file's time of change identifies its contents: a younger one may change within the same time."""
_VERSION_OF_REMOTE = ("size", "ETag", "etag", "Content-MD5", "LastModified", "last_modified", "mtime", "generation")
"""Attributes of a remote file that change with its contents."""


@dataclass(frozen=True)
class DataFile:
    """One file of a source.

    Args:
        path: of it, or its address.
        format: of its rows.
        identity: a checksum of its bytes.
        local: path on this machine.
        split: of a saved data set.
    """

    path: str
    format: Format
    identity: str
    local: Path
    split: str | None = None

    @property
    def compression(self) -> str | None:
        """Compression of its text, by its name."""
        return next((kind for suffix, kind in COMPRESSED.items() if self.path.lower().endswith(suffix)), None)

    @property
    def reading(self) -> str:
        """Parameters of reading its bytes as rows, which the names of its files in the cache depend on."""
        return f"{self.format} {self.delimiters if self.format == 'csv' else ''} {self.compression or ''}"

    @property
    def delimiters(self) -> str:
        """Characters that may separate its columns, as CSV; the likeliest first."""
        return "\t,;" if _without_compression(self.path).endswith(".tsv") else ",;\t"


def default_cache() -> Path:
    """Default cache directory, of files in the form that this system reads."""
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
    opened = [_open(file, cache) for file in files]
    for file, rows in zip(files, opened, strict=True):
        if rows.in_columns != opened[0].in_columns:
            raise UserError(
                f"{file.path} and {files[0].path}: {file.format} and {files[0].format} in one source, and one of "
                "them has the same columns in every row; expected a source for each"
            )
    return opened[0] if len(opened) == 1 else Concatenated(opened)


def _expanded(given: str) -> list[str]:
    if "://" in given:
        if not _WILD.search(given) or given.startswith(("http://", "https://")):  # where "?" begins a query
            return [given]
        filesystem, path = _remote(given)
        paths = [
            filesystem.unstrip_protocol(match)
            for match in sorted(_call_filesystem(given, lambda: filesystem.glob(path)))
        ]
    elif not _WILD.search(given) or os.path.lexists(given):
        return [given]
    else:
        paths = sorted(glob.glob(given))  # noqa: PTH207 - a pattern that may be absolute
    if not paths:
        raise UserError(f"{given}: no file has such a name")
    return paths


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
    if known := next((format for suffix, format in SUFFIXES.items() if name.endswith(suffix)), None):
        return known
    raise UserError(
        f"{path}: the name does not say the format; expected one of {', '.join(SUFFIXES)}, or format= of the source"
    )


def _without_compression(path: str) -> str:
    name = path.lower()
    suffix = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    return name.removesuffix(suffix)


def _directory_identity(directory: Path, cache: Path) -> str:
    """Identity of a saved data set: a hash of the names and bytes of its files."""
    if not (directory / "dataset_info.json").exists() and not (directory / "dataset_dict.json").exists():
        raise UserError(f"{directory}: no data set that `datasets` has saved, expected dataset_info.json in it")
    state = hashlib.sha256()
    for path in sorted(file for file in directory.rglob("*") if file.is_file()):
        state.update(f"{path.relative_to(directory)}\0{_checksum(path, cache)}\0".encode())
    return f"sha256:{state.hexdigest()}"


def _checksum(path: Path, cache: Path) -> str:
    """Checksum of a file's bytes, kept in the cache until its size, times or path change."""
    status = path.stat()
    known = f"{path}\0{status.st_dev}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
    kept = cache / "checksums" / hashlib.sha256(known.encode()).hexdigest()
    try:
        return kept.read_text().strip()
    except OSError:
        digest = checksum(path)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        write_once(kept, lambda temporary: _write_text(temporary, digest))
    return digest


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _fetched(address: str, cache: Path) -> Path:
    """Copy the current version of a file of another file system."""
    filesystem, path = _remote(address)
    info = _call_filesystem(address, lambda: filesystem.info(path))
    if info.get("type") == "directory":
        raise UserError(f"{address}: a directory, expected a file; or a pattern of files, such as {address}/*.parquet")
    version = [
        _call_filesystem(address, lambda: filesystem.ukey(path)),
        *(str(info.get(name)) for name in _VERSION_OF_REMOTE),
    ]
    name = hashlib.sha256("\0".join((address, *map(str, version))).encode()).hexdigest()[:32]
    kept = cache / "fetched" / f"{name}-{Path(path).name[-60:]}"
    return write_once(
        kept, lambda temporary: _call_filesystem(address, lambda: filesystem.get_file(path, str(temporary)))
    )


def _call_filesystem[T](address: str, ask: Callable[[], T]) -> T:
    """Call a file system. Raises UserError for whatever its library raises."""
    try:
        return ask()
    except Exception as raised:
        error: BaseException = raised
        if isinstance(raised, FileNotFoundError):
            if raised.__cause__ is None or isinstance(raised.__cause__, FileNotFoundError):
                raise UserError(f"{address}: no such file") from None
            error = raised.__cause__  # such as a refused connection, or a status of HTTP
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{address}: cannot be read: {shortened(reason, 200)}") from None


def write_once(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a file or directory of the cache under another name and rename it: complete, or not at all.

    Raises:
        UserError: the cache cannot be written.
    """
    if path.exists():
        return path
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _flush(temporary)  # else its name may be on the disk before its contents
        temporary.rename(path)
    except OSError as error:
        if not path.exists():  # another process may have been first
            raise UserError(f"data.files.cache: cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):  # it may not have been written
                temporary.unlink()
    return path


def _flush(written: Path) -> None:
    """Bring a file, or those of a directory, to the disk."""
    for path in written.iterdir() if written.is_dir() else (written,):
        bring_to_disk(path)


def _open(file: DataFile, cache: Path) -> Rows:
    kept = cache / "rows" / hashlib.sha256(f"{file.reading}\0{file.identity}".encode()).hexdigest()[:32]
    if file.format == "dataset":
        return _saved_dataset(file)
    if file.format in ("jsonl", "json"):
        text = file.local
        if not is_utf8(file.local, file.compression):
            text = write_once(kept, lambda temporary: _copy(file, temporary))
        if is_lines(text, file.format):
            return JsonLines(text, file.path)
        listed = kept.with_name(f"{kept.name}-list")
        return JsonLines(
            write_once(listed, lambda temporary: write_lines(text, temporary, file.path)), file.path, is_list=True
        )
    if file.format == "arrow" and not _is_compressed(file):
        return ArrowRows(list(_from_arrow(file.local, file.path)), file.path)
    read = {"arrow": _from_compressed_arrow, "csv": _from_csv, "parquet": _from_parquet}[file.format]
    return ArrowRows(list(_from_arrow(write_once(kept, lambda temporary: read(file, temporary)), file.path)), file.path)


def _copy(file: DataFile, temporary: Path) -> None:
    copy_as_utf8(file.local, temporary, file.compression, file.path)


@contextmanager
def _text(file: DataFile, temporary: Path) -> Iterator[Path]:
    """Path of a file's text in UTF-8: the file itself, or a copy next to `temporary` while it is read."""
    if is_utf8(file.local, file.compression):
        yield file.local
        return
    copy = temporary.with_name(f"{temporary.name}.text")
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
    """True if batches of an Arrow file take memory of their own, as those of compressed files do."""
    before = pa.total_allocated_bytes()
    batch = next((candidate for candidate in _from_arrow(file.local, file.path) if len(candidate)), None)
    return batch is not None and pa.total_allocated_bytes() - before > batch.nbytes // 2


def _from_compressed_arrow(file: DataFile, temporary: Path) -> None:
    _write_batches(file, temporary, _from_arrow(file.local, file.path))


def _from_parquet(file: DataFile, temporary: Path) -> None:
    _write_batches(file, temporary, _parquet_batches(file))


def _parquet_batches(file: DataFile) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.local, memory_map=True) as read:
            for group in range(
                read.num_row_groups
            ):  # batches of several groups cannot be joined if dictionaries are nested
                yield from read.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: cannot be read as Parquet ({_reason(error)})") from None


def _write_batches(file: DataFile, path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    """Write batches as a stream, in which every batch may have its own dictionaries."""
    if (first := next(batches, None)) is None:
        raise UserError(f"{file.path} holds no rows")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _from_csv(file: DataFile, temporary: Path) -> None:
    with _text(file, temporary) as path:
        _write_batches(file, temporary, csv_files.batches(path, file.path, file.delimiters, _BATCH_ROWS))


def _reason(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()), 200)


class _SavedRows:
    """Rows of a saved data set, in the order that it has."""

    in_columns = True

    def __init__(self, dataset: Any, name: str) -> None:
        if not len(dataset):
            raise UserError(f"{name} holds no rows")
        as_arrow = dataset.with_format("arrow")[:SAMPLE_ROWS]  # pictures and sounds are bytes there
        self._columns = TableColumns.of(dataset.features.arrow_schema, as_arrow.column)
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
            raise UserError(f"{self.location(begin)}: {_reason(error)}") from None
        return [
            self._columns.row(
                {name: columns[name][number - begin] for name in columns},
                lambda number=number: self.location(number),  # type: ignore[misc]
            )
            for number in range(begin, end)
        ]

    def location(self, number: int) -> str:
        return f"{self._name}, row {number}"


def _saved_dataset(file: DataFile) -> Rows:
    import datasets  # takes a second

    try:
        dataset = datasets.load_from_disk(str(file.local))
    except Exception as error:  # the library raises any kind of error
        raise UserError(f"{file.path}: {shortened(' '.join(str(error).split()), 200)}") from None
    if isinstance(dataset, datasets.DatasetDict):
        if file.split not in dataset:
            given = "no split" if file.split is None else f"split={file.split}"
            raise UserError(f"{file.path}: {given}, expected one of {', '.join(dataset)}")
        dataset = dataset[file.split]
    elif file.split is not None:
        raise UserError(f"{file.path}: a data set without splits, with split={file.split}; expected none")
    return _SavedRows(dataset, file.path)
