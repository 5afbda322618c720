"""Files of a source as rows: what has to be turned into another form for that is kept in the cache."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from engine3d.checkpoint.manifest import checksum
from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_LINE_BYTES, FileError, check_regular
from hybridflow.data.files.config import COMPRESSED, SUFFIXES, FileSource, Format
from hybridflow.data.files.rows import ArrowRows, Concatenated, JsonLines, Rows, plain

_WILD = re.compile(r"[*?\[]")
_BLOCK = 1 << 24
MOST_JSON_BYTES = 1 << 30
"""Of a file that is one list of objects."""


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
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def _expanded(given: str) -> list[str]:
    if "://" in given:
        if not _WILD.search(given):
            return [given]
        filesystem, path = _remote(given)
        scheme = given.partition("://")[0]
        found = [f"{scheme}://{each}" for each in sorted(filesystem.glob(path))]
    elif Path(given).exists() or not _WILD.search(given):
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
        return DataFile(path, format, _directory_identity(local), local, source.split)
    try:
        check_regular(local)
    except FileError as error:
        raise UserError(f"cannot read rows from {error}") from None
    if source.split is not None:
        raise UserError(f"{path}: a file with split={source.split}, expected it of a saved data set alone")
    return DataFile(path, format, _checksum(local, cache), local)


def _format(path: str) -> Format:
    if "://" not in path and Path(path).is_dir():
        return "dataset"
    name = path.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    if found := next((format for suffix, format in SUFFIXES.items() if name.endswith(suffix)), None):
        return found
    raise UserError(
        f"{path}: the name does not say the format; expected one of {', '.join(SUFFIXES)}, or format= of the source"
    )


def _directory_identity(directory: Path) -> str:
    """Of a saved data set: of the names and bytes of its files."""
    if not (directory / "dataset_info.json").exists() and not (directory / "dataset_dict.json").exists():
        raise UserError(f"{directory}: no data set that `datasets` has saved, expected dataset_info.json in it")
    state = hashlib.sha256()
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        state.update(f"{path.relative_to(directory)}\0{checksum(path)}\0".encode())
    return f"sha256:{state.hexdigest()}"


def _checksum(path: Path, cache: Path) -> str:
    """Of a file's bytes; kept in the cache for as long as its size, time and place do not change."""
    facts = path.stat()
    known = f"{path}\0{facts.st_dev}\0{facts.st_ino}\0{facts.st_size}\0{facts.st_mtime_ns}"
    kept = cache / "checksums" / hashlib.sha256(known.encode()).hexdigest()
    try:
        return kept.read_text().strip()
    except OSError:
        found = checksum(path)
    write_once(kept, lambda part: _write_text(part, found))
    return found


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _fetched(address: str, cache: Path) -> Path:
    """A copy of a file of another file system, as it is there now."""
    filesystem, path = _remote(address)
    try:
        facts = filesystem.info(path)
        token = str(filesystem.ukey(path))
    except FileNotFoundError:
        raise UserError(f"{address}: no such file") from None
    except Exception as error:  # of whatever library the file system is in
        raise UserError(f"{address}: {shortened(' '.join(str(error).split()), 200)}") from None
    name = hashlib.sha256(f"{address}\0{token}\0{facts.get('size')}".encode()).hexdigest()[:32]
    kept = cache / "fetched" / f"{name}-{Path(path).name}"
    return write_once(kept, lambda part: filesystem.get_file(path, str(part)))


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
        part.rename(path)
    except OSError as error:
        if not path.exists():  # or another process was first
            raise UserError(f"data.files.cache: cannot write {path}: {error.strerror or error}") from None
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    return path


def _open(file: DataFile, cache: Path) -> Rows:
    kept = cache / "rows" / hashlib.sha256(f"{file.format}\0{file.identity}".encode()).hexdigest()[:32]
    if file.format == "dataset":
        return _saved_dataset(file)
    if file.format == "arrow":
        return ArrowRows(_arrow_batches(file.local, file.path), file.path)
    if file.format == "parquet":
        return ArrowRows(_arrow_batches(write_once(kept, lambda part: _from_parquet(file, part)), file.path), file.path)
    if file.format == "csv":
        return ArrowRows(_arrow_batches(write_once(kept, lambda part: _from_csv(file, part)), file.path), file.path)
    if file.format == "json":
        return JsonLines(write_once(kept, lambda part: _from_json(file, part)), file.path)
    if file.local.suffix.lower() in COMPRESSED:
        return JsonLines(write_once(kept, lambda part: _copied(file, part)), file.path)
    return JsonLines(file.local, file.path)


def _text(file: DataFile) -> IO[bytes]:
    """The bytes of a file, uncompressed."""
    import fsspec

    opened = fsspec.open(str(file.local), "rb", compression="infer").open()
    assert isinstance(opened, io.IOBase)
    return opened  # type: ignore[return-value]


def _copied(file: DataFile, part: Path) -> None:
    try:
        with _text(file) as read, part.open("wb") as written:
            shutil.copyfileobj(read, written, _BLOCK)
    except (OSError, EOFError) as error:
        raise UserError(f"{file.path}: cannot be uncompressed: {error}") from None


def _arrow_batches(path: Path, name: str) -> list[pa.RecordBatch]:
    """The record batches of an Arrow file, in its file or its stream format, mapped into memory."""
    source = pa.memory_map(str(path))
    try:
        try:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except pa.ArrowInvalid:
            source.seek(0)
            return list(pa.ipc.open_stream(source))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{name}: not an Arrow file ({shortened(str(error), 120)})") from None


def _from_parquet(file: DataFile, part: Path) -> None:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.local, memory_map=True) as read:
            schema = pa.schema([field.with_type(_decoded_type(field.type)) for field in read.schema_arrow])
            _write_batches(part, schema, (batch.cast(schema) for batch in read.iter_batches(batch_size=4096)))
    except pa.ArrowInvalid as error:
        raise UserError(f"{file.path}: not a Parquet file ({shortened(' '.join(str(error).split()), 120)})") from None


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    """That of the values where a column has a dictionary: an Arrow file can hold only one for all batches."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _from_csv(file: DataFile, part: Path) -> None:
    """All columns as text: what a number looks like belongs to the answer."""
    from pyarrow import csv as arrow_csv

    tabs = ".tsv" in Path(file.path).name.lower()
    parse = arrow_csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)
    try:
        with _text(file) as read:
            first = read.readline(MOST_LINE_BYTES).decode("utf-8-sig")
        header = next(csv.reader([first], delimiter=parse.delimiter), [])
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise UserError(f"{file.path}: column {twice!r} is named twice in the first line")
        kinds = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False, quoted_strings_can_be_null=False
        )
        with _text(file) as read, arrow_csv.open_csv(read, parse_options=parse, convert_options=kinds) as rows:
            parts = (batch.slice(begin, 4096) for batch in rows for begin in range(0, len(batch), 4096))
            _write_batches(part, rows.schema, parts)
    except (pa.ArrowInvalid, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file.path}: {shortened(' '.join(str(error).split()), 200)}") from None


def _from_json(file: DataFile, part: Path) -> None:
    """A list of objects as one object a line."""
    with _text(file) as read:
        data = read.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES:
        raise UserError(
            f"{file.path}: more than {MOST_JSON_BYTES:,} bytes in one list of JSON, expected one object a line (jsonl)"
        )
    try:
        rows = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{file.path}: not JSON ({shortened(str(error), 120)})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file.path}: a JSON {type(rows).__name__}, expected one list of objects; or format=jsonl")
    part.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


class _SavedRows:
    """Rows of a saved data set, in the order that it has."""

    def __init__(self, dataset: Any, name: str) -> None:
        import datasets

        if not len(dataset):
            raise UserError(f"{name} holds no rows")
        binary = {column for column, kind in dataset.features.items() if _decoded(kind, datasets)}
        self.columns = tuple(column for column in dataset.column_names if column not in binary)
        self._dataset, self._name = dataset.select_columns(list(self.columns)).with_format(None), name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: plain(value) for name, value in self._dataset[number].items()}

    def read(self, begin: int, end: int) -> list[dict[str, Any]]:
        columns = self._dataset[begin:end]
        return [{name: plain(columns[name][row]) for name in columns} for row in range(end - begin)]

    def place(self, number: int) -> str:
        return f"{self._name}, row {number}"


def _decoded(kind: Any, datasets: Any) -> bool:
    """Whether a column holds pictures, sounds or bytes."""
    media = (datasets.Image, datasets.Audio, datasets.Video)
    return isinstance(kind, media) or getattr(kind, "dtype", "") in ("binary", "large_binary")


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
