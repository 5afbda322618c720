"""Columns of Arrow: texts stored as bytes, and names of class labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine3d.errors import UserError
from hybridflow.data.files.config import FileSource
from hybridflow.data.files.encoding import check_columns
from hybridflow.data.files.formats.opening import files_of, open_rows
from hybridflow.data.files.formats.rows import Rows


def opened(path: Path) -> Rows:
    cache = path.parent / "cache"
    return open_rows(files_of(FileSource(path=(str(path),)), cache), cache)


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())], ids=str
)
def test_texts_that_are_stored_as_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([b"2", None, "\u00e4".encode()], pa.binary()).cast(kind)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.schema([("a", kind)])) as writer,
    ):
        writer.write_table(pa.table({"a": values}))
    assert opened(tmp_path / "a.arrow").read(0, 3) == [{"a": "2"}, {"a": None}, {"a": "\u00e4"}]


def test_texts_that_are_stored_as_bytes_within_objects_and_lists(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.binary()), ("content", pa.large_binary())])
    kinds = {
        "prompt": pa.list_(message),
        "reward_model": pa.struct([("ground_truth", pa.binary())]),
        "tags": pa.map_(pa.binary(), pa.list_(pa.binary())),
        "extra": pa.struct([("name", pa.binary()), ("picture", pa.binary())]),
        "hash": pa.struct([("sha", pa.binary(2))]),
    }
    row = {
        "prompt": [{"role": b"user", "content": "gr\u00f6\u00dfer?".encode()}],
        "reward_model": {"ground_truth": b"2"},
        "tags": [(b"level", [b"5", None])],
        "extra": {"name": b"x", "picture": b"\xff\xd8"},
        "hash": {"sha": b"ab"},
    }
    empty: dict[str, Any] = {
        "prompt": [],
        "reward_model": {"ground_truth": None},
        "tags": None,
        "extra": None,
        "hash": None,
    }
    columns = [pa.array([row[name], empty[name]], kind) for name, kind in kinds.items()]
    pq.write_table(pa.table(columns, names=list(kinds)), tmp_path / "a.parquet")
    rows = opened(tmp_path / "a.parquet")
    assert rows.left_out == ("extra", "hash")
    assert rows.read(0, 2) == [
        {
            "prompt": [{"role": "user", "content": "gr\u00f6\u00dfer?"}],
            "reward_model": {"ground_truth": "2"},
            "tags": {"level": ["5", None]},
        },
        {"prompt": [], "reward_model": {"ground_truth": None}, "tags": None},
    ]
    for column in ("extra", "extra.name"):
        with pytest.raises(UserError, match="row 0: column 'extra' has bytes that are no text in UTF-8"):
            check_columns(FileSource(path=(str(tmp_path / "a.parquet"),), answer=column), rows)


def test_bytes_that_are_no_text_are_left_out_and_named_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "answer": [b"\xff"]}), path)
    rows = opened(path)
    assert rows[0] == {"prompt": "a"}
    with pytest.raises(UserError, match=r"row 0: column 'answer' has bytes that are no text in UTF-8, expected text"):
        check_columns(FileSource(path=(str(path),)), rows)
    pq.write_table(pa.table({"prompt": ["a"] * 20, "answer": [b"1"] * 19 + [b"\xff"]}), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 19: column 'answer' has bytes that are no text in UTF-8"):
        opened(path).read(0, 20)


@pytest.mark.parametrize("format", ["parquet", "dataset"])
def test_class_labels_are_their_names(tmp_path: Path, format: str) -> None:
    import datasets

    label = datasets.ClassLabel(names=["no", "yes"])
    features = {"label": label, "labels": [label], "inside": {"label": label}, "many": datasets.List({"label": label})}
    rows: list[dict[str, Any]] = [
        {"label": 1, "labels": [0, 1], "inside": {"label": 0}, "many": [{"label": 1}], "n": 1},
        {"label": -1, "labels": [], "inside": {"label": None}, "many": [], "n": 0},
    ]
    made = datasets.Dataset.from_list(rows, features=datasets.Features(features | {"n": datasets.Value("int64")}))
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        made.to_parquet(path)
    else:
        made.save_to_disk(path)
    assert opened(path).read(0, 2) == [
        {"label": "yes", "labels": ["no", "yes"], "inside": {"label": "no"}, "many": [{"label": "yes"}], "n": 1},
        {"label": None, "labels": [], "inside": {"label": None}, "many": [], "n": 0},
    ]


def test_descriptions_that_are_none_are_passed_over(tmp_path: Path) -> None:
    for described in (
        b"{",
        b"[]",
        b'{"info": {"features": 3}}',
        b'{"info": {"features": {"a": {"_type": "ClassLabel"}}}}',
    ):
        table = pa.table({"a": [1]}).replace_schema_metadata({b"huggingface": described})
        pq.write_table(table, tmp_path / "a.parquet")
        assert opened(tmp_path / "a.parquet")[0] == {"a": 1}


def test_floats_of_less_than_64_bits_are_their_shortest_decimals(tmp_path: Path) -> None:
    columns = {
        "answer": pa.array([1234.56, None], pa.float32()),
        "rate": pa.array([0.1, float("nan")], pa.float16()),
        "double": pa.array([0.1, 1234.56005859375]),
        "of_list": pa.array([[0.1, None], None], pa.list_(pa.float32())),
        "of_object": pa.array([{"a": 0.7, "b": 0.7}, None], pa.struct([("a", pa.float32()), ("b", pa.float64())])),
        "of_map": pa.array([[("k", 0.3)], None], pa.map_(pa.string(), pa.float32())),
        "of_dictionary": pa.array([2.2, 2.2], pa.float32()).dictionary_encode(),
    }
    first = {
        **{"answer": 1234.56, "rate": 0.1, "double": 0.1, "of_list": [0.1, None], "of_object": {"a": 0.7, "b": 0.7}},
        **{"of_map": {"k": 0.3}, "of_dictionary": 2.2},
    }
    second = {**dict.fromkeys(columns), "double": 1234.56005859375, "of_dictionary": 2.2}
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table(columns)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert opened(tmp_path / "a.arrow").read(0, 2) == [first, second]
