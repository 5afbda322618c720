"""Reference answers: which are missing, and which are whole numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.answers import is_missing
from hybridflow.data.files.prompts import FilePrompts
from hybridflow.data.tasks import read_jsonl
from hybridflow.data.tokenizer import make_chat_tokenizer

from .files.tokenizers import read_prompts

NAN = math.nan


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(params=["jsonl", "json", "parquet", "arrow"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(directory: Path, format: str, answers: list[Any]) -> Path:
    path = directory / f"rows.{format}"
    rows = [{"prompt": f"{number}+1=", "answer": answer} for number, answer in enumerate(answers)]
    if format == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif format == "json":
        path.write_text(json.dumps(rows))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def read(tokenizer: PreTrainedTokenizerBase, path: Path, **source: Any) -> FilePrompts:
    return read_prompts(tokenizer, path.parent / "cache", {"path": str(path), **source})


@pytest.mark.parametrize("answer", [None, NAN, "", " \n", [], [None], ["", None, [NAN]], {}, {"target": None}])
def test_what_holds_nothing_is_missing(answer: Any) -> None:
    assert is_missing(answer)


@pytest.mark.parametrize("answer", [0, 0.0, False, "0", "nan", ["", "2"], [0], {"target": 0}, math.inf])
def test_what_holds_something_is_an_answer(answer: Any) -> None:
    assert not is_missing(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "first"),
    [([NAN, 2.5], 0), (["2", None], 1), (["2", "", "3"], 1), ([["2", "two"], []], 1), ([["2"], [None]], 1)],
)
def test_the_first_row_without_an_answer_is_known(
    tmp_path: Path, format: str, answers: list[Any], first: int, chat: PreTrainedTokenizerBase
) -> None:
    prompts = read(chat, write(tmp_path, format, answers))
    ((counts, location),) = prompts.answer_counts()
    assert (counts.rows, counts.missing, counts.first_missing) == (len(answers), 1, first)
    assert location.endswith(f"rows.jsonl:{first + 1}" if format == "jsonl" else f"rows.{format}, row {first}")
    left = read(chat, write(tmp_path, format, answers), where={"answer": {"present": True}})
    assert len(left) == len(answers) - 1 and left.answer_counts()[0][0].missing == 0


def test_nan_is_null_in_every_column(tmp_path: Path, format: str, chat: PreTrainedTokenizerBase) -> None:
    example = read(chat, write(tmp_path, format, [NAN, 2.5])).examples[0]
    assert example.answer is None and example.fields["answer"] is None


def test_a_nan_in_a_nested_column_is_null_and_half_floats_are_numbers(
    tmp_path: Path, chat: PreTrainedTokenizerBase
) -> None:
    nested = pa.array([{"ground_truth": NAN}, None, {"ground_truth": 0.5}])
    half = pa.array([NAN, 1.5, 2.0], type=pa.float16())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "reward_model": nested, "half": half}), path)
    examples = read(chat, path, answer="reward_model.ground_truth").examples
    assert [example.answer for example in examples] == [None, None, 0.5]
    assert [example.answer for example in read(chat, path, answer="half").examples] == [None, 1.5, 2.0]


def test_whole_numbers_that_pandas_has_written_as_floats_are_whole(
    tmp_path: Path, format: str, chat: PreTrainedTokenizerBase
) -> None:
    prompts = read(chat, write(tmp_path, format, [5.0, NAN, -3.0, 1e300, 0.0][:3]))
    assert [example.answer for example in prompts.examples] == ["5", None, "-3"]
    assert not list(prompts.answers())
    prompts = read(chat, write(tmp_path, format, [5.0, 2.5, NAN]))
    assert [example.answer for example in prompts.examples] == [5.0, 2.5, None]
    assert list(prompts.answers()) == [2.5]


def test_a_float_beyond_what_is_exact_stays_a_float(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    prompts = read(chat, write(tmp_path, "jsonl", [5.0, 1e300]))
    assert [example.answer for example in prompts.examples] == [5.0, 1e300]


def test_lines_of_json_in_memory_are_read_alike(tmp_path: Path) -> None:
    examples = read_jsonl(write(tmp_path, "jsonl", [5.0, NAN, 7]))
    assert [example.answer for example in examples] == ["5", None, "7"]
    assert examples[1].location.endswith("rows.jsonl:2")
    assert [example.answer for example in read_jsonl(write(tmp_path, "jsonl", [5.0, 2.5]))] == [5.0, 2.5]


def test_rows_may_lack_the_column_and_not_all_of_them(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "a", "rm": None}, {"prompt": "b"}, {"prompt": "c", "rm": {"truth": "2"}}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    prompts = read(chat, path, answer="rm.truth")
    assert [example.answer for example in prompts.examples] == [None, None, "2"]
    assert prompts.answer_counts()[0][0].missing == 2
    with pytest.raises(UserError, match=r"a\.jsonl:1: no column 'rm\.true', only 'prompt', 'rm'"):
        read(chat, path, answer="rm.true")
    with pytest.raises(UserError, match=r"a\.jsonl:1: no column 'answr', only 'prompt', 'rm'"):
        read(chat, path, answer="answr")


def test_answers_that_say_that_there_is_none_are_counted_and_kept(
    tmp_path: Path, chat: PreTrainedTokenizerBase
) -> None:
    prompts = read(chat, write(tmp_path, "jsonl", ["2", "proof", "NaN", "proof", "Proofs"]))
    assert prompts.answer_counts()[0][0].remarks == {"proof": 2, "NaN": 1}
    assert [example.answer for example in prompts.examples] == ["2", "proof", "NaN", "proof", "Proofs"]
