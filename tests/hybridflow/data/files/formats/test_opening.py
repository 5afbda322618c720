"""Files of every format as the same rows, and those that cannot be read."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from engine3d.errors import UserError
from engine3d.input_files import AS_UTF8
from hybridflow.data.files.config import FileSource
from hybridflow.data.files.formats import json_files, opening
from hybridflow.data.files.formats.opening import default_cache, files_of, open_rows, write_once
from hybridflow.data.files.formats.rows import Rows

ROWS = [
    {"prompt": "1+2=", "answer": "007", "level": "1"},
    {"prompt": 'eins\n\u2028\u00e4 "x", \U0001f600', "answer": "", "level": "2"},
    {"prompt": "'a\tb'", "answer": "true", "level": "3"},
]


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def as_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def as_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def as_arrow(path: Path, rows: list[dict[str, Any]], compression: str | None = None) -> None:
    table = pa.Table.from_pylist(rows)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)


def as_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def as_dataset(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(path)


def opened(path: Any, cache: Path, **settings: Any) -> Rows:
    source = FileSource.model_validate({"path": path if isinstance(path, list) else str(path), **settings})
    return open_rows(files_of(source, cache), cache)


def all_rows(path: Any, cache: Path, **settings: Any) -> list[Any]:
    rows = opened(path, cache, **settings)
    return list(rows.read(0, len(rows)))


def refused(path: Any, cache: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        opened(path, cache, **settings)
    assert "\n" not in str(error.value)
    left = [path.name for path in cache.rglob("*") if path.name.startswith(".")]
    assert not left  # nothing half-written
    return str(error.value)


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.jsonl": as_jsonl,
    "a.ndjson": as_jsonl,
    "a.json": as_json,
    "a.csv": as_csv,
    "a.tsv": as_csv,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "stream.arrow": as_stream,
    "saved": as_dataset,
    "A.JSONL": as_jsonl,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_rows(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    rows = opened(tmp_path / name, tmp_path / "cache")
    assert list(rows.read(0, 3)) == [rows[number] for number in range(3)] == ROWS
    assert rows.columns == ("prompt", "answer", "level")
    location = f"{tmp_path / name}:3" if name.lower().endswith(("jsonl", "ndjson")) else f"{tmp_path / name}, row 2"
    assert rows.location(2) == location
    assert all_rows(tmp_path / name, tmp_path / "cache") == ROWS  # of what is kept


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz", ".GZ"])
def test_compressed_texts(tmp_path: Path, suffix: str) -> None:
    compress = {
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }[suffix.lower()]
    for name in ("a.jsonl", "a.csv", "a.json"):
        FORMATS[name](tmp_path / name, ROWS)
        plain = (tmp_path / name).read_bytes()
        path = tmp_path / f"{name}{suffix}"
        half = len(plain) // 2
        path.write_bytes(compress(plain[:half]) + compress(plain[half:]))  # as several files after another are
        assert all_rows(path, tmp_path / "cache") == ROWS
        random_bytes = random.Random(1).randbytes(3000)
        path.write_bytes(compress(plain + b"\n" + random_bytes)[:-200])
        assert refused(path, tmp_path / "cache").startswith(f"{path}: cannot be uncompressed: ")
        path.write_bytes(b"no such thing")
        assert refused(path, tmp_path / "cache").startswith(f"{path}: cannot be uncompressed: ")
    assert not list((tmp_path / "cache").rglob("*.text"))


def test_compressed_arrow_files_are_not_kept_in_memory(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} " * 500} for number in range(200)]
    for compression in ("lz4", "zstd", None):
        path = tmp_path / f"{compression}.arrow"
        as_arrow(path, rows, compression)
        before = pa.total_allocated_bytes()
        stored = opened(path, tmp_path / "cache")
        assert pa.total_allocated_bytes() - before < 50_000
        assert list(stored.read(0, 200)) == rows
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 2


def test_nested_columns_and_dictionaries_of_parquet(tmp_path: Path) -> None:
    named = pa.dictionary(pa.int32(), pa.string())
    kinds = {"kind": named, "kinds": pa.list_(named), "inside": pa.struct([("kind", named)])}
    columns = [{"kind": [x], "kinds": [[x, "b"]], "inside": [{"kind": x}]} for x in ("x", "y")]
    tables = [
        pa.table([pa.array(values[name], type=kind) for name, kind in kinds.items()], names=list(kinds))
        for values in columns
    ]
    with pq.ParquetWriter(tmp_path / "a.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    expected = [{"kind": x, "kinds": [x, "b"], "inside": {"kind": x}} for x in ("x", "y")]
    assert all_rows(tmp_path / "a.parquet", tmp_path / "cache") == expected


# CSV


def test_columns_of_csv_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in ("a,b\n007,\nNULL,1.50\n", "\n\na,b\n007,\nNULL,1.50\n", '\ufeff"a",b\r\n007,\r\nNULL,1.50'):
        path.write_text(text, encoding="utf-8", newline="")
        assert all_rows(path, tmp_path / "cache") == [{"a": "007", "b": ""}, {"a": "NULL", "b": "1.50"}]
    path.write_text('"a\nx",b\n007,1\n')
    assert all_rows(path, tmp_path / "cache") == [{"a\nx": "007", "b": "1"}]


def test_rows_of_csv_may_be_long(tmp_path: Path) -> None:
    rows = [{"a": "x" * 3_000_000, "b": "1"}, {"a": 'y"\n' * 1000, "b": "2"}]
    as_csv(tmp_path / "a.csv", rows)
    assert all_rows(tmp_path / "a.csv", tmp_path / "cache") == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": Empty CSV file"),
        ("a,b\n", " holds no rows"),
        ("a,b\n1,2\n1,2,3\n", ": CSV parse error: "),
        ("a,b,a\n1,2,3\n", ": column 'a' is named twice in the first line"),
        ("a,b\n1,2\n3,\xfc\n", f":3: not text in UTF-8; {AS_UTF8}"),
        ("gr\xf6\xdfe,b\n1,2\n", f":1: not text in UTF-8; {AS_UTF8}"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    refusal = refused(path, tmp_path / "cache")
    assert refusal.startswith(f"{path}{message}")
    if "parse" in message:
        assert "Expected 2 columns, got 3: 1,2,3" in refusal


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q;a\none, two;1,5\n", [{"q": "one, two", "a": "1,5"}]),
        ('\n"q, or more";"a"\n"x;y";1\n', [{"q, or more": "x;y", "a": "1"}]),
        ("q\ta\nx;y\t1\n", [{"q": "x;y", "a": "1"}]),
        ("q,a\n1;2,3\n", [{"q": "1;2", "a": "3"}]),
        ("q\n1;2\n", [{"q": "1;2"}]),
        ('"q;a"\n1\n', [{"q;a": "1"}]),
    ],
)
def test_columns_of_csv_are_separated_as_in_the_first_line(
    tmp_path: Path, name: str, text: str, expected: list[dict[str, str]]
) -> None:
    (tmp_path / name).write_text(text)
    assert all_rows(tmp_path / name, tmp_path / "cache") == expected


# Encodings


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.csv.gz", "a.jsonl.xz"])
def test_texts_with_a_byte_order_mark(tmp_path: Path, name: str, encoding: str) -> None:
    rows = [{"prompt": "Gr\u00f6\u00dfe? \U0001f600", "answer": "ja"}, {"prompt": "x" * 50, "answer": "1"}]
    plain_name = name.removesuffix(".gz").removesuffix(".xz")
    if plain_name.endswith("json"):
        text = json.dumps(rows, ensure_ascii=False)
    elif plain_name.endswith("jsonl"):
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    else:
        mark = "\t" if plain_name.endswith("tsv") else ","
        text = "".join(f"{mark.join(line)}\n" for line in (rows[0], *(row.values() for row in rows)))
    data = ("\ufeff" + text if encoding == "utf-16-be" else text).encode(encoding)
    compress: Any = {"gz": gzip.compress, "xz": lzma.compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(compress(data))
    assert all_rows(tmp_path / name, tmp_path / "cache") == rows
    assert all_rows(tmp_path / name, tmp_path / "cache") == rows  # of what is kept


def test_text_in_utf_16_that_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "a"}\n'.encode("utf-16")[:-1])
    message = f"{tmp_path}/a.jsonl: begins as text in UTF-16 and cannot be read as such: "
    assert refused(tmp_path / "a.jsonl", tmp_path / "cache").startswith(message)


# Bad files of other formats


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.json", tmp_path / "cache"
    for text, message in (
        ("[1", ": not JSON (no comma at column 3)"),
        ('[{"a": ' + "1" * 5000 + "}]", ": not JSON (a whole number has 5,000 digits, expected at most 4,000)"),
        ("[" * 100_000, ": not JSON (nested more than 64 levels deep)"),
        ("[1]", ": a list, expected one list of objects, or one object a line"),
        ("3", ": a number, expected one list of objects, or one object a line"),
        ('[{"a": 1, "a": 2}]', ": not JSON ('a' is in an object twice)"),
        ("[]", " holds no rows"),
        ("", ": not JSON (it is empty)"),
    ):
        path.write_text(text)
        assert refused(path, cache) == f"{path}{message}"
    path.write_bytes(b"\xff[]")
    assert refused(path, cache) == f"{path}: not JSON (not text in UTF-8; {AS_UTF8})"


def test_a_list_of_json_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MOST_JSON_BYTES", 20)
    as_json(tmp_path / "a.json", ROWS)
    message = f"{tmp_path}/a.json: more than 20 bytes in one list of JSON, expected one object a line (jsonl)"
    assert refused(tmp_path / "a.json", tmp_path / "cache") == message


def test_parquet_and_arrow_that_cannot_be_read(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = tmp_path / "a.parquet"
    as_parquet(path, [{"a": "x" * 50 + str(number)} for number in range(3000)])
    content = path.read_bytes()
    for data in (b"", b"PAR1", b"nonsense" * 10, content[:-100], content[:400] + bytes(1000) + content[1400:]):
        path.write_bytes(data)
        assert refused(path, cache).startswith(f"{path}: cannot be read as Parquet (")
    as_parquet(path, [{"a": 1}])
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert refused(path, cache) == f"{path} holds no rows"
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(twice, path)
    assert refused(path, cache) == f"{path}: there are two columns named 'a', expected each name once"
    path = tmp_path / "a.arrow"
    as_arrow(path, ROWS)
    for data in (b"", b"ARROW1", b"nonsense" * 10, path.read_bytes()[:-100]):
        path.write_bytes(data)
        assert refused(path, cache).startswith(f"{path}: not an Arrow file (")


# Names


def test_several_files_and_wildcards_in_order(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, number in (("b-2.jsonl", 2), ("b-1.jsonl", 1), ("a.jsonl", 0), ("c[1].jsonl", 3)):
        as_jsonl(tmp_path / name, [{"n": number}])
    assert all_rows(tmp_path / "b-*.jsonl", cache) == [{"n": 1}, {"n": 2}]
    assert all_rows([str(tmp_path / "b-*.jsonl"), str(tmp_path / "a.jsonl")], cache) == [{"n": 1}, {"n": 2}, {"n": 0}]
    assert all_rows(tmp_path / "c[1].jsonl", cache) == [{"n": 3}]  # there is a file of this name
    assert all_rows(tmp_path / "b-[12].jsonl", cache) == [{"n": 1}, {"n": 2}]
    assert refused(tmp_path / "d*.jsonl", cache) == f"{tmp_path}/d*.jsonl: no file has such a name"


def test_names_that_say_nothing(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "a.txt"
    as_jsonl(path, ROWS)
    assert refused(path, cache) == (
        f"{path}: the name does not say the format; expected one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet, "
        ".arrow, or format= of the source"
    )
    assert all_rows(path, cache, format="jsonl") == ROWS
    missing = tmp_path / "no.jsonl"
    assert refused(missing, cache) == f"cannot read rows from {missing}: no such file"
    message = refused(f"/{'x' * 300}.jsonl", cache)
    assert message.endswith("x.jsonl: cannot be read: File name too long")
    assert refused(f"/{'x' * 300}*.jsonl", cache).endswith("*.jsonl: no file has such a name")
    assert refused(tmp_path, cache) == (
        f"{tmp_path}: no data set that `datasets` has saved, expected dataset_info.json in it"
    )
    assert refused(tmp_path, cache, format="csv") == (
        f"cannot read rows from {tmp_path}: is a directory, expected a regular file"
    )
    as_jsonl(tmp_path / "b.jsonl", ROWS)
    assert refused(tmp_path / "b.jsonl", cache, split="train") == (
        f"{tmp_path}/b.jsonl: a file with split=train, expected it of a saved data set alone"
    )
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert refused(tmp_path / "pipe.jsonl", cache).endswith("pipe.jsonl: is a named pipe, expected a regular file")


def test_the_same_bytes_under_other_names_are_other_rows(tmp_path: Path) -> None:
    for name, expected in (
        ("a.csv", [{"a\tb": "1\t2", "c": "3"}]),
        ("a.tsv", [{"a": "1", "b,c": "2,3"}]),
        ("a.tsv-export.csv", [{"a\tb": "1\t2", "c": "3"}]),
    ):
        (tmp_path / name).write_text("a\tb,c\n1\t2,3\n")
        assert all_rows(tmp_path / name, tmp_path / "cache") == expected


# Saved data sets


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    as_dataset(tmp_path / "one", ROWS)
    cache = tmp_path / "cache"
    assert all_rows(tmp_path / "both", cache, split="test") == ROWS[:1]
    assert all_rows(tmp_path / "both", cache, split="train", format="dataset") == ROWS
    assert refused(tmp_path / "both", cache) == f"{tmp_path}/both: no split, expected one of train, test"
    assert refused(tmp_path / "both", cache, split="tests") == (
        f"{tmp_path}/both: split=tests, expected one of train, test"
    )
    assert refused(tmp_path / "one", cache, split="train") == (
        f"{tmp_path}/one: a data set without splits, with split=train; expected none"
    )
    (tmp_path / "one" / "state.json").write_text("{")
    assert refused(tmp_path / "one", cache).startswith(f"{tmp_path}/one: ")


def test_a_saved_data_set_that_was_filtered_and_has_columns_of_bytes(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": [{"role": "user", "content": f"{number}"}], "raw": b"\xff", "n": number} for number in range(9)]
    dataset = datasets.Dataset.from_list(rows).shuffle(seed=1).filter(lambda row: row["n"] % 2 == 0)
    dataset.save_to_disk(tmp_path / "saved")
    kept = all_rows(tmp_path / "saved", tmp_path / "cache")
    assert kept == [{"prompt": row["prompt"], "n": row["n"]} for row in dataset]
    assert sorted(row["n"] for row in kept) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("format", ["parquet", "dataset"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"a", b"b", b"\xff"], pa.binary()).view(pa.string()),
        pa.array([0, 1, 4 * 10**17], pa.timestamp("us")),
        pa.array([0, 1, 4 * 10**6], pa.date32()),
    ],
    ids=["no text", "time", "date"],
)
def test_a_value_that_python_cannot_hold_is_named_by_its_row(tmp_path: Path, format: str, column: pa.Array) -> None:
    import datasets

    table, path = pa.table({"a": [1, 2, 3], "b": column}), tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    rows = opened(path, tmp_path / "cache")
    assert [row["a"] for row in rows.read(0, 2)] == [1, 2]
    for read in (lambda: rows.read(0, 3), lambda: rows[2]):
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).startswith(f"{path}, row 2: " + ("column 'b': " if format == "parquet" else ""))
        assert "\n" not in str(error.value)


def test_pictures_of_a_saved_data_set_are_left_out_as_those_of_parquet(tmp_path: Path) -> None:
    import datasets

    picture = {"bytes": b"\x89PNG\r\n", "path": None}
    row = {"prompt": "a", "one": picture, "several": [picture], "inside": {"picture": picture}, "sizes": [[1, 2]]}
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "one": datasets.Image(),
            "several": datasets.List(datasets.Image()),
            "inside": {"picture": datasets.Image()},
            "sizes": datasets.Array2D((1, 2), "int64"),
        }
    )
    dataset = datasets.Dataset.from_list([row], features=features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "a.parquet")
    saved, parquet = (opened(tmp_path / name, tmp_path / "cache") for name in ("saved", "a.parquet"))
    assert saved.columns == parquet.columns == ("prompt", "sizes")
    assert saved[0] == parquet[0] == {"prompt": "a", "sizes": [[1, 2]]}


# Other file systems


def test_files_of_another_file_system_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, cache = fsspec.filesystem("memory"), tmp_path / "cache"
    for name in ("a.jsonl", "a.csv.gz", "part-2.jsonl", "part-1.jsonl"):
        FORMATS[name.removesuffix(".gz") if name in FORMATS or ".gz" in name else "a.jsonl"](tmp_path / name, ROWS)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv.gz").read_bytes()))
    for name in ("a.jsonl", "a.csv.gz", "part-2.jsonl", "part-1.jsonl"):
        memory.pipe_file(f"/rows/{name}", (tmp_path / name).read_bytes())
    assert all_rows("memory://rows/a.jsonl", cache) == ROWS
    assert all_rows("memory://rows/a.csv.gz", cache) == ROWS
    assert opened("memory://rows/part-*.jsonl", cache).location(3) == "memory:///rows/part-2.jsonl:1"
    assert all_rows(f"file://{tmp_path}/a.jsonl", cache) == ROWS
    assert all_rows(f"file://{tmp_path}/part-[12].jsonl", cache) == ROWS * 2
    monkeypatch.setattr(type(memory), "get_file", None)
    assert all_rows("memory://rows/a.jsonl", cache) == ROWS  # not again
    monkeypatch.undo()
    memory.pipe_file("/rows/a.jsonl", b'{"a": 1}')
    assert all_rows("memory://rows/a.jsonl", cache) == [{"a": 1}]  # what is there now
    memory.rm("/rows", recursive=True)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_gives_no_file_is_quoted(status: int, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        assert refused(address, tmp_path / "cache").startswith(f"{address}: cannot be read: {status}, ")
        server.shutdown()
    assert refused(address, tmp_path / "cache").startswith(f"{address}: cannot be read: Cannot connect to host")


def test_addresses_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    assert refused("memory://rows/no.jsonl", cache) == "memory://rows/no.jsonl: no such file"
    assert refused("memory://rows/no-*.jsonl", cache) == "memory://rows/no-*.jsonl: no file has such a name"
    assert refused("nowhere://a/b.jsonl", cache).startswith("nowhere://a/b.jsonl: Protocol not known: nowhere")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/rows/a.jsonl", b"{}")
    assert refused("memory://rows", cache, format="jsonl").startswith("memory://rows: a directory, expected a file; or")
    message = "memory://rows: a saved data set on another file system, expected it on this machine"
    assert refused("memory://rows", cache, format="dataset") == message

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("connection\nreset")

    monkeypatch.setattr(type(memory), "get_file", fails)
    assert refused("memory://rows/a.jsonl", cache) == "memory://rows/a.jsonl: cannot be read: connection reset"
    memory.rm("/rows", recursive=True)


def test_a_query_of_an_address_is_no_wildcard() -> None:
    address = "https://host.invalid/a.jsonl?part=1"
    assert opening._expanded(address) == [address]


# The cache


def test_a_file_of_the_cache_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "a" / "b"

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    def fails_with_directory(temporary: Path) -> None:
        temporary.mkdir()
        (temporary / "x").write_text("half")
        raise KeyboardInterrupt

    def writes(temporary: Path) -> None:
        temporary.write_text("whole")

    for write in (fails, fails_with_directory):
        with pytest.raises(KeyboardInterrupt):
            write_once(path, write)
        assert list(path.parent.iterdir()) == []
    assert write_once(path, writes).read_text() == "whole"
    assert write_once(path, fails).read_text() == "whole"  # not again


def test_of_two_processes_that_write_the_same_both_have_it(tmp_path: Path) -> None:
    path = tmp_path / "made"

    def second(temporary: Path) -> None:
        temporary.mkdir()
        (temporary / "x").write_text("1")

    def first(temporary: Path) -> None:
        write_once(path, second)
        second(temporary)

    assert (write_once(path, first) / "x").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    as_json(tmp_path / "a.json", ROWS)
    message = refused(tmp_path / "a.json", tmp_path / "file" / "cache")
    assert message.startswith(f"data.files.cache: cannot write {tmp_path}/file/cache/rows/")
    assert message.endswith(": Not a directory")


def test_checksums_are_kept_of_files_that_have_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Path] = []
    real = opening.checksum

    def checksum(path: Path) -> str:
        counted.append(path)
        return real(path)

    monkeypatch.setattr(opening, "checksum", checksum)
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    as_jsonl(path, ROWS)
    source = FileSource.model_validate({"path": str(path)})
    first = files_of(source, cache)
    assert files_of(source, cache) == first
    assert len(counted) == 2  # it could have been written again since, at the same time by the clock of the files
    now = time.time_ns()
    monkeypatch.setattr(opening.time, "time_ns", lambda: now + 3_000_000_000)
    for _ in range(3):
        assert files_of(source, cache) == first
    assert len(counted) == 3
    as_jsonl(path, ROWS[::-1])
    os.utime(path, ns=(path.stat().st_atime_ns, now - 10**12))
    assert files_of(source, cache) != first


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache() == Path("/x/hybridflow/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "hybridflow" / "data"


def test_files_of_a_source_go_to_another_process(tmp_path: Path) -> None:
    as_json(tmp_path / "a.json", ROWS)
    files = files_of(FileSource.model_validate({"path": str(tmp_path / "a.json")}), tmp_path / "cache")
    assert pickle.loads(pickle.dumps(files)) == files


def test_files_of_a_source_have_their_columns_in_every_row_or_none_has(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    as_jsonl(tmp_path / "a.jsonl", ROWS)
    as_parquet(tmp_path / "b.parquet", ROWS)
    paths = tuple(str(tmp_path / name) for name in ("a.jsonl", "b.parquet"))
    with pytest.raises(UserError, match=r"b.parquet and .*a.jsonl: parquet and jsonl in one source"):
        open_rows(files_of(FileSource(path=paths), cache), cache)
