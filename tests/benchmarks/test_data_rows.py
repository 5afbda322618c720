"""Rows as prompts: every way of the benchmark gives the same token ids, without its cache and with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks import data_rows
from benchmarks.data_rows import Way
from hybridflow.data.tokenizer import load_tokenizer

ROWS = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(data_rows, "_BATCH", 128)
        data_rows.make_files(directory, ROWS)
    return directory


def test_rows_are_what_they_are_said_to_be(made: Path) -> None:
    lines = (made / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(data_rows.make_rows(ROWS))
    assert pq.read_table(made / "rows.parquet").to_pylist() == list(data_rows.make_rows(ROWS))
    lengths = [len(row["prompt"]) for row in data_rows.make_rows(ROWS)]
    assert 85 < sum(lengths) / ROWS < 115
    tokenizer = load_tokenizer(made / "tokenizer")
    for texts in ("raw", "user"):
        messages = [{"role": "user", "content": "x"}]
        template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert Way("list", made, ROWS, texts, 1).prompt("x") == ("x" if texts == "raw" else template)


@pytest.mark.slow
@pytest.mark.parametrize("texts", ["raw", "user"])
def test_all_ways_have_the_same_token_ids(made: Path, texts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["jsonl", "parquet", "datasets", *(["list"] if texts == "raw" else [])]
    # In this process: seconds of imports in another are none of the test's.
    monkeypatch.setattr(data_rows, "in_own_process", data_rows.read_once)
    by_reader: dict[str, Any] = {name: data_rows.measure(Way(name, made, 200, texts, 50)) for name in names}
    data_rows.check_same(by_reader)
    for measurement in by_reader.values():
        assert measurement["encode"]["rows_per_second"] > 0
        assert measurement["encode"]["anonymous_peak_bytes"] >= measurement["encode"]["anonymous_held_bytes"] > 0
        assert "checksums" not in measurement["encode"]
    assert [name for name in names if "open" in by_reader[name]] == [name for name in names if name != "list"]
    assert not list((made / "cache").iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rows", "0"], "data_rows.py: --rows is 0, expected at least 1"),
        (["--rows", "5"], "data_rows.py: --compared-rows is 200000 of 5 rows, expected at most these"),
        (["--formats", "csv"], "data_rows.py: --formats is csv, expected some of jsonl,parquet"),
        (["--texts", "x"], "data_rows.py: argument --texts: invalid choice: 'x' (choose from 'raw', 'user')"),
    ],
)
def test_arguments_that_cannot_be_right_are_one_line(
    tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_rows.main(["--directory", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == line + "\n"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_before_rows_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_rows.main(["--directory", str(tmp_path), "--rows", "1000000000000"]) == 2
    assert "expected 1,525,878,906 for 1,000,000,000,000 rows" in capsys.readouterr().err
    (tmp_path / "data-rows").mkdir()
    assert data_rows.main(["--directory", str(tmp_path)]) == 2
    assert f"there is {tmp_path}/data-rows already; expected none, or --keep" in capsys.readouterr().err
