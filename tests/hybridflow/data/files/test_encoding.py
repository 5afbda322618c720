"""Rows as prompts with token ids, and the cache that holds them."""

from __future__ import annotations

import copy
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine3d.errors import UserError
from hybridflow.data.files import encoding
from hybridflow.data.files.config import FilesConfig
from hybridflow.data.files.encoding import encode_files
from hybridflow.data.files.formats import opening
from hybridflow.data.remarks import lines
from hybridflow.data.tokenizer import encode_prompts

from .tokenizers import QWEN_LIKE, read_prompts, texts

USER = "<|user|>{}<|end|><|assistant|>"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", [{"prompt": f"{n}+1=", "answer": n + 1, "level": n % 3} for n in range(8)])


def refused(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        read_prompts(*arguments, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_texts_are_their_own_tokens_or_a_message_of_the_user(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase
) -> None:
    raw = read_prompts(chat, tmp_path / "cache", {"path": str(file)})
    assert texts(chat, raw) == [f"{n}+1=" for n in range(8)]
    assert raw.raw == 8
    user = read_prompts(chat, tmp_path / "cache", {"path": str(file)}, chat={"texts": "user"})
    assert texts(chat, user) == [USER.format(f"{n}+1=") for n in range(8)]
    assert user.raw == 0
    assert user.examples[3].prompt == USER.format("3+1=")


def test_the_special_tokens_of_a_tokenizer_are_those_of_texts_alone(
    tmp_path: Path, chat: PreTrainedTokenizerBase
) -> None:
    tokenizer = copy.deepcopy(chat)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    )
    prompts = read_prompts(tokenizer, tmp_path / "cache", {"path": str(path), "answer": None})
    assert texts(tokenizer, prompts) == ["<bos>a", USER.format("b"), "<bos>c"]
    assert prompts.raw == 2


def test_special_tokens_that_a_text_has_already_are_reported(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    tokenizer = copy.deepcopy(chat)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<bos> $A <|end|>", special_tokens=[("<bos>", 1), ("<|end|>", 2)]
    )
    rows = ["a", "<bos>b", "<bos>c<|end|>", [{"role": "user", "content": "d"}]]
    source = {"path": str(write(tmp_path / "a.jsonl", [{"prompt": text} for text in rows])), "answer": None}
    first = f"the first is {tmp_path}/a.jsonl"
    for _ in range(2):  # the second finds what the first has kept
        prompts = read_prompts(tokenizer, tmp_path / "cache", source)
        assert texts(tokenizer, prompts) == ["<bos>a", "<bos><bos>b", "<bos><bos>c<|end|>", USER.format("d")]
        assert lines(prompts.spans[0].remarks, tokenizer, "rows") == [
            f"data: 2 rows begin with '<bos>' twice: the text has one, and the tokenizer puts one before it; {first}:2",
            f"data: 1 rows end with '<|end|>', after which a model has nothing to continue; {first}:3",
        ]


@pytest.mark.slow
def test_the_same_tokens_as_of_prompts_in_memory(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"What is {n}\u00e4 \U0001f600?" * (n % 5 + 1), "answer": "x"} for n in range(1500)]
    prompts = read_prompts(bpe, tmp_path / "cache", {"path": str(write(tmp_path / "a.jsonl", rows))})
    examples = [prompts.examples[index] for index in range(1500)]
    assert list(prompts.tokens) == encode_prompts(bpe, examples, max_tokens=1000)
    assert [example.fields for example in examples] == rows


def test_null_columns_of_parquet_are_dropped_before_the_template_sees_them(
    tmp_path: Path, bpe: PreTrainedTokenizerBase
) -> None:
    messages = [
        [{"role": "user", "content": "a", "tool_calls": None}],
        [
            {"role": "user", "content": "b", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "c", "tool_calls": None},
        ],
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": row, "answer": "x"} for row in messages]), tmp_path / "a.parquet")
    prompts = read_prompts(bpe, tmp_path / "cache", {"path": str(tmp_path / "a.parquet")})
    assert texts(bpe, prompts) == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        '<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n[{"name": "f"}]<|im_end|>\n'
        "<|im_start|>tool\nc<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_calls_of_tools_in_a_prompt_have_their_own_arguments_from_every_format(
    tmp_path: Path, bpe: PreTrainedTokenizerBase
) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        called = {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}
        return {"prompt": [{"role": "user", "content": "a"}, called, {"role": "tool", "content": "c"}], "answer": "x"}

    rows, cache = [row("weather", city="Bonn"), row("add", a=1, b=2)], tmp_path / "cache"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    lines = read_prompts(bpe, cache, {"path": str(write(tmp_path / "a.jsonl", rows))})
    columns = read_prompts(bpe, cache, {"path": str(tmp_path / "b.parquet")})
    assert list(lines.tokens) == list(columns.tokens)
    assert columns.examples[0].prompt == lines.examples[0].prompt
    with_null = {"path": str(write(tmp_path / "c.jsonl", [row("weather", city=None)]))}
    assert '{"city": null}' in texts(bpe, read_prompts(bpe, cache, with_null))[0]


def test_tools_of_rows_from_every_format(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    def tool(name: str, **properties: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    given = [[tool("weather", city={"type": "string"})], [tool("add", a={"type": "number"}), tool("clock")], None, []]
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": "a"}], "tools": tools} for tools in given]
    template = tmp_path / "tools.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}")

    def read(path: Path) -> list[str]:
        source = {"path": str(path), "tools": "tools", "answer": None}
        prompts = read_prompts(bpe, tmp_path / "cache", source, chat={"template": str(template)})
        assert prompts.spans[0].with_tools == 2 and not prompts.spans[0].remarks
        assert prompts.examples[1].prompt == expected[1]
        return texts(bpe, prompts)

    expected = [f"{json.dumps(tools) if tools else ''}a" for tools in given]
    assert read(write(tmp_path / "a.jsonl", [*rows[:3], {"prompt": rows[0]["prompt"]}])) == expected
    as_text = [row | {"tools": json.dumps(row["tools"]) if row["tools"] else None} for row in rows]
    assert read(write(tmp_path / "b.jsonl", as_text)) == expected
    listed = [row | {"tools": row["tools"] and list(map(json.dumps, row["tools"]))} for row in rows]
    for name, some in {"c": rows, "d": as_text, "e": listed}.items():
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"{name}.parquet")
        read_back = read(tmp_path / f"{name}.parquet")
        assert [json.loads(text[:-1] or "null") for text in read_back] == [tools or None for tools in given]


def test_tools_that_no_prompt_has_are_reported_or_refused(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, chat: PreTrainedTokenizerBase
) -> None:
    tools, cache = [{"name": "weather"}], tmp_path / "cache"
    message = {"role": "user", "content": "a"}
    path = write(tmp_path / "a.jsonl", [{"prompt": [message], "tools": tools}, {"prompt": [message]}])
    source = {"path": str(path), "answer": None}
    [span] = read_prompts(chat, cache, source).spans
    assert lines(span.remarks, chat, "training rows of a") == [
        "data: 1 training rows of a have tools in a column 'tools' that the prompts leave out; the setting tools of a "
        f"source (tools_field of pairs) renders them; the first is {path}:1"
    ]
    assert refused(chat, cache, source | {"tools": "tools"}) == (
        "a: tools=tools, and the chat template does not read tools; expected null"
    )
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools }}{{ messages[0].content }}")
    settings = {"chat": {"template": str(template)}}
    assert refused(bpe, cache, source | {"tools": "functions"}, **settings).startswith(
        f"{path}:1: no column 'functions'"
    )
    write(path, [{"prompt": [message], "tools": "weather"}])
    assert refused(bpe, cache, source | {"tools": "tools"}, **settings) == (
        f"{path}:1: tools are 'weather', expected a list of objects, or its JSON text"
    )
    write(path, [{"prompt": "a", "tools": tools}])
    assert "a text, to which no template is applied" in refused(bpe, cache, source | {"tools": "tools"}, **settings)


def test_other_tools_are_other_prompts(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools | tojson if tools else '' }}{{ messages[0].content }}")
    source = {"path": str(write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "a"}], "answer": ""}]))}

    def read(*tools: dict[str, Any]) -> list[str]:
        chat = {"template": str(template), "tools": tools}
        return texts(bpe, read_prompts(bpe, tmp_path / "cache", source, chat=chat))

    assert [read(), read({"name": "f"}), read({"name": "g"})] == [["a"], ['[{"name": "f"}]a'], ['[{"name": "g"}]a']]


@pytest.mark.parametrize("column", ["images", "image"])
def test_pictures_are_refused(tmp_path: Path, chat: PreTrainedTokenizerBase, column: str) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>what?"}], column: ["a.png"], "answer": "a"}
    path = write(tmp_path / "a.jsonl", [row | {column: []}, row])
    line = refused(chat, tmp_path / "cache", {"path": str(path)})
    assert f"{path}:2: column '{column}' has what <image> in the prompt stands for" in line


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_messages_as_a_text_of_json(tmp_path: Path, chat: PreTrainedTokenizerBase, format: str) -> None:
    messages = [{"role": "user", "content": "[1]", "name": None}]
    rows = [{"prompt": json.dumps(messages)}, {"prompt": "[1, 2]"}, {"prompt": '[{"a": 1}]'}, {"prompt": "[{1}]"}]
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        write(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    prompts = read_prompts(chat, tmp_path / "cache", {"path": str(path), "answer": None})
    assert texts(chat, prompts) == [USER.format("[1]"), "[1, 2]", '[{"a": 1}]', "[{1}]"]
    assert prompts.raw == 3


@pytest.mark.parametrize(
    "text", ["[{'role': 'user', 'content': 'a'}]", "[{'content': 'a', 'role': 'user'}\n {'x': 1}]"]
)
def test_messages_as_python_prints_them_are_refused(tmp_path: Path, chat: PreTrainedTokenizerBase, text: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": text}])
    message = refused(chat, tmp_path / "cache", {"path": str(path), "answer": None})
    assert message.startswith(f"{path}:1: column 'prompt': the text ") and "a list as Python prints it" in message


def test_messages_of_from_and_value(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    said = [("system", "S"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("human", "d")]
    messages = [{"from": speaker, "value": value} for speaker, value in said]
    source = {"prompt": "conversations", "answer": None}
    path = write(tmp_path / "a.jsonl", [{"conversations": messages}])
    prompts = read_prompts(chat, tmp_path / "cache", source | {"path": str(path)})
    assert texts(chat, prompts) == [
        "<|system|>S<|end|><|user|>a<|end|><|assistant|>b<|end|><|tool|>c<|end|><|user|>d<|end|><|assistant|>"
    ]
    write(path, [{"conversations": [{"from": "narrator", "value": "a"}]}])
    assert refused(chat, tmp_path / "cache", source | {"path": str(path)}).startswith(
        f"{path}:1: message 1 is from 'narrator', expected one of human, gpt, observation, system, "
    )


def test_a_column_of_objects_as_texts_of_json(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "reward_model": '{"ground_truth": "4"}'}])
    source = {"path": str(path), "answer": "reward_model.ground_truth"}
    assert read_prompts(chat, tmp_path / "cache", source).examples[0].answer == "4"
    write(path, [{"prompt": "a", "reward_model": "4"}])
    assert refused(chat, tmp_path / "cache", source).startswith(f"{path}:1: no column 'reward_model.ground_truth'")


def test_rows_that_are_dropped_are_counted_by_why(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "x" * n, "answer": "", "level": n % 4, "extra": {"rate": n / 10}} for n in range(1, 21)]
    source = {"path": str(write(tmp_path / "a.jsonl", rows)), "where": {"level": [0, 1, 2], "extra.rate": {"max": 1.8}}}
    prompts = read_prompts(
        chat, tmp_path / "cache", source, policy="drop", max_tokens=12, min_prompt_tokens=3, max_prompt_tokens=16
    )
    assert prompts.tokens.lengths().tolist() == [4, 5, 6, 8, 9, 10, 12]  # type: ignore[attr-defined]
    [span] = prompts.spans
    assert span.dropped == {
        "another level (where)": 5,
        "another extra.rate (where)": 1,
        "fewer than 3 tokens (min_prompt_tokens)": 2,
        "more than 12 tokens (data.overlong_prompts=drop)": 3,
        "more than 16 tokens (max_prompt_tokens)": 2,
    }
    assert (prompts.overlong, span.begin, span.end) == (3, 0, 7)
    assert [prompts.examples[index].identity for index in range(7)] == [f"a:{n}" for n in (3, 4, 5, 7, 8, 9, 11)]


def test_only_the_first_rows_before_any_condition(tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase) -> None:
    prompts = read_prompts(chat, tmp_path / "cache", {"path": str(file), "rows": 4, "where": {"level": [0]}})
    assert texts(chat, prompts) == ["0+1=", "3+1="]


def test_a_first_row_without_the_columns_may_be_left_out(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", [{"kind": "head"}, {"kind": "row", "prompt": "a", "answer": "b", "x.y": 1}])
    source = {"path": str(path), "where": {"kind": "row"}}
    assert texts(chat, read_prompts(chat, tmp_path / "cache", source)) == ["a"]
    assert texts(chat, read_prompts(chat, tmp_path / "cache", source | {"where": {"x.y": 1}})) == ["a"]


def test_several_sources_are_one_after_the_other(tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase) -> None:
    other = write(tmp_path / "b.jsonl", [{"q": {"text": "x"}, "a": True, "n": "id-1"}, {"q": {"text": "y"}, "a": 1}])
    second = {"path": str(other), "prompt": "q.text", "answer": "a", "where": {"n": "id-1"}, "id": "n", "name": "own"}
    prompts = read_prompts(chat, tmp_path / "cache", {"path": [str(file), str(file)], "rows": 10}, second)
    assert texts(chat, prompts) == [f"{n % 8}+1=" for n in range(10)] + ["x"]
    assert [(span.label, span.begin, span.end) for span in prompts.spans] == [("a", 0, 10), ("own", 10, 11)]
    assert prompts.columns == ("prompt", "answer", "level", "q", "a", "n")
    assert prompts.answers() == [True]
    assert [prompts.examples[index].identity for index in (9, 10)] == ["a:9", "own:id-1"]
    assert [prompts.examples[index].answer for index in (9, 10)] == ["2", True]


def test_a_row_without_a_label_and_a_prompt_of_no_tokens(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert read_prompts(bpe, tmp_path / "cache", {"path": str(path), "answer": None}).examples[0].answer == ""
    empty = tmp_path / "empty.jinja"
    empty.write_text("{{ messages[0].content }}")
    write(path, [{"prompt": [{"role": "user", "content": ""}]}])
    settings = {"chat": {"template": str(empty)}}
    message = refused(bpe, tmp_path / "cache", {"path": str(path), "answer": None}, **settings)
    assert message == f"{path}:1: the prompt has no tokens, expected at least one"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "", "answer": ""}, {}, ": column 'prompt' is '', expected a text or a list of messages, not empty"),
        ({"prompt": [], "answer": ""}, {}, ": column 'prompt' is [], expected a text or a list of messages"),
        ({"prompt": 3, "answer": ""}, {}, ": column 'prompt' is 3, expected a text or a list of messages"),
        ({"prompt": None, "answer": ""}, {}, ": column 'prompt' is null, expected a text or a list of messages"),
        (
            {"prompt": [{"content": "x"}], "answer": ""},
            {},
            ': message 1 is {"content": "x"}, expected an object with role',
        ),
        ({"prompt": "\u00e4", "answer": ""}, {}, " ('\u00e4') cannot be encoded: "),
        ({"prompt": "\ud800", "answer": ""}, {}, " ('\\ud800') cannot be encoded: "),
        ({"prompt": "a", "answer": ""}, {"id": "n"}, ": no column 'n', only 'prompt', 'answer'"),
        (
            {"prompt": "a", "answer": "", "n": 1.5},
            {"id": "n"},
            ": column 'n' is 1.5, expected a text or a whole number",
        ),
        ({"prompt": "a", "answer": "", "n": ""}, {"id": "n"}, ": column 'n' is '', expected a text or a whole number"),
        (
            {"prompt": "a", "answer": "", "n": True},
            {"id": "n"},
            ": column 'n' is true, expected a text or a whole number",
        ),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, chat: PreTrainedTokenizerBase, row: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    good = {"prompt": "a", "answer": "b", "n": "x"}
    path = write(tmp_path / "a.jsonl", [good, row])
    assert refused(chat, tmp_path / "cache", {"path": str(path), **settings}).startswith(f"{path}:2{message}")
    assert not (tmp_path / "cache" / "tokens").exists() or not list((tmp_path / "cache" / "tokens").iterdir())


def test_what_is_missing_is_said_of_the_first_row(tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase) -> None:
    cache = tmp_path / "cache"
    assert refused(chat, cache, {"path": str(file), "prompt": "question"}) == (
        f"{file}:1: no column 'question', only 'prompt', 'answer', 'level'"
    )
    assert refused(chat, cache, {"path": str(file), "where": {"subject": 1}}) == (
        f"{file}:1: where has column 'subject', and there are only 'prompt', 'answer', 'level'"
    )


def test_a_column_that_only_later_lines_have_keeps_their_rows(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"{n}", "answer": ""} | ({"good": 1} if n > 1200 else {}) for n in range(1203)]
    source = {"path": str(write(tmp_path / "a.jsonl", rows)), "where": {"good": 1}}
    assert texts(chat, read_prompts(chat, tmp_path / "cache", source)) == ["1201", "1202"]
    assert refused(chat, tmp_path / "cache", source | {"where": {"god": 1}}) == (
        f"{source['path']}:1: where has column 'god', and there are only 'prompt', 'answer'"
    )


def test_numbers_are_no_values_of_a_column_of_texts(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    path, cache = tmp_path / "a.csv", tmp_path / "cache"
    path.write_text("prompt,answer,level\na,x,4\nb,y,5\n")
    for condition in ({"none_of": [5]}, [4], {"min": 5}, {"none_of": [True]}, {"none_of": [5, "6"]}):
        assert refused(chat, cache, {"path": str(path), "where": {"level": condition}}) == (
            f"{path}, row 0: column 'level' is of texts, such as '4', and where compares it with other values; "
            "expected one_of or none_of with texts, in quotes"
        )
    in_quotes = {"path": str(path), "where": {"level": {"none_of": ["5"]}}}
    assert texts(chat, read_prompts(chat, cache, in_quotes)) == ["a"]


def test_dates_compare_with_those_of_parquet(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    days = [datetime.date(2026, 1, day) for day in (1, 2, 3)]
    rows = [{"prompt": f"{day.day}", "answer": "", "day": day} for day in days]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for condition, kept in ((days[1], ["2"]), ({"one_of": days[1:]}, ["2", "3"]), ({"none_of": days[:2]}, ["3"])):
        source = {"path": str(tmp_path / "a.parquet"), "where": {"day": condition}}
        assert texts(chat, read_prompts(chat, tmp_path / "cache", source)) == kept


def test_two_rows_of_one_name(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"{n}", "answer": "", "n": n if n < 1500 else 7} for n in range(1501)]
    path = write(tmp_path / "a.jsonl", rows)
    assert refused(chat, tmp_path / "cache", {"path": str(path), "id": "n"}) == (
        f"{path}: column 'n' has a value twice, expected one that names a row; or id=null, and rows are named by their "
        "numbers"
    )
    assert (
        len(read_prompts(chat, tmp_path / "cache", {"path": str(path), "id": "n", "where": {"n": {"min": 8}}})) == 1492
    )


@pytest.mark.parametrize(
    ("policy", "raw", "user"),
    [("cut_left", "45678", "678"), ("cut_right", "01234", "012"), ("cut_middle", "01278", "018"), ("drop", None, None)],
)
def test_prompts_that_are_too_long_by_policy(
    tmp_path: Path, chat: PreTrainedTokenizerBase, policy: Any, raw: str | None, user: str | None
) -> None:
    rows = [{"prompt": "ok", "answer": ""}, {"prompt": "012345678", "answer": ""}]
    source = {"path": str(write(tmp_path / "a.jsonl", rows))}
    cache = tmp_path / "cache"
    prompts = read_prompts(chat, cache, source, policy=policy, max_tokens=5)
    assert texts(chat, prompts) == ["ok", raw][: 1 + (raw is not None)]
    assert prompts.overlong == 1
    prompts = read_prompts(chat, cache, source, policy=policy, max_tokens=6, chat={"texts": "user"})
    assert texts(chat, prompts) == [USER.format("ok"), USER.format(user)][: 1 + (user is not None)]
    if raw is not None:  # rewards get all of it
        assert prompts.examples[1].prompt == USER.format("012345678")
    assert refused(chat, cache, source, policy="refuse", max_tokens=5) == (
        f"{source['path']}:2: the prompt has 9 tokens, expected at most 5; or data.overlong_prompts=drop, cut_left, "
        "cut_right or cut_middle"
    )


def test_a_slow_tokenizer_is_refused(tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase) -> None:
    class Slow:
        is_fast, chat_template = False, None

    config = FilesConfig.model_validate({"train": [{"path": str(file)}], "cache": str(tmp_path / "cache")})
    with pytest.raises(UserError, match=r"data\.files: a Slow, expected a tokenizer of the tokenizers library"):
        encode_files(config.train, config, Slow(), max_tokens=9, policy="drop")  # type: ignore[arg-type]


# The cache


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that were encoded, as they come."""
    made: list[Path] = []
    real = encoding._write

    def write(directory: Path, *rest: Any) -> Any:
        made.append(directory)
        return real(directory, *rest)

    monkeypatch.setattr(encoding, "_write", write)
    return made


def test_a_second_run_encodes_nothing(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, encoded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_prompts(chat, tmp_path / "cache", {"path": str(file), "name": "x"})
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", None)  # would raise
    moved = file.rename(tmp_path / "elsewhere.ndjson")
    # Neither where the rows lie nor how often they are drawn is of the tokens.
    again = read_prompts(chat, tmp_path / "cache", {"path": str(moved), "format": "jsonl", "name": "y", "weight": 2})
    assert len(encoded) == 1
    assert list(again.tokens) == list(first.tokens)
    assert again.text_hashes().tolist() == first.text_hashes().tolist()
    assert (again.columns, again.overlong, again.raw) == (first.columns, first.overlong, first.raw)
    assert again.spans[0].label == "y"
    assert again.examples[2].identity == "y:2"


def test_what_the_last_call_left_in_a_tokenizer_is_no_other_tokenizer(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, encoded: list[Path]
) -> None:
    tokenizer = copy.deepcopy(chat)
    for _ in range(2):
        read_prompts(tokenizer, tmp_path / "cache", {"path": str(file)}, policy="cut_left", max_tokens=3)
        tokenizer("abc", truncation=True, max_length=2, padding="max_length")
    assert len(encoded) == 1


def other_tokenizer(chat: PreTrainedTokenizerBase, change: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(chat)
    if change == "post-processor":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    elif change == "added token":
        tokenizer.add_tokens(["+1"])
    elif change == "special token":
        tokenizer.bos_token = "<|user|>"
    elif change == "template":
        tokenizer.chat_template = QWEN_LIKE
    elif change == "special tokens are split":
        tokenizer.split_special_tokens = True
    return tokenizer


@pytest.mark.parametrize(
    "change", ["post-processor", "added token", "special token", "template", "special tokens are split"]
)
def test_another_tokenizer_is_another_key(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, encoded: list[Path], change: str
) -> None:
    for tokenizer in (chat, other_tokenizer(chat, change), chat):
        read_prompts(tokenizer, tmp_path / "cache", {"path": str(file)})
    assert len(encoded) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"source": {"prompt": "answer_text"}},
        {"source": {"answer": None}},
        {"source": {"id": "answer_text"}},
        {"source": {"where": {"level": 1}}},
        {"source": {"rows": 3}},
        {"chat": {"system": "x"}},
        {"chat": {"texts": "user"}},
        {"chat": {"generation_prompt": False}},
        {"chat": {"arguments": {"enable_thinking": False}}},
        {"chat": {"template": "own.jinja"}},
        {"min_prompt_tokens": 2},
        {"max_prompt_tokens": 900},
        {"max_tokens": 999},
        {"policy": "cut_left"},
        {"content": True},
        {"more": True},
        {"format": True},
    ],
    ids=str,
)
def test_every_setting_that_matters_is_of_the_key(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, encoded: list[Path], change: dict[str, Any]
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "answer_text": f"{n}", "level": n % 3} for n in range(8)]
    path = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    read_prompts(bpe, tmp_path / "cache", {"path": str(path)})
    source: dict[str, Any] = {"path": str(path)} | change.pop("source", {})
    if change.pop("content", False):
        path.write_text(path.read_text().replace("0+1", "0-1"))
    if change.pop("more", False):
        source["path"] = [str(path), str(path)]
    if change.pop("format", False):
        path.with_suffix(".json").write_text(json.dumps(rows))
        source["path"] = str(path.with_suffix(".json"))
    if "template" in change.get("chat", {}):
        change["chat"] = {"template": str(tmp_path / "own.jinja")}
    for _ in range(2):
        read_prompts(bpe, tmp_path / "cache", source, **change)
    assert len(encoded) == 2


def test_another_text_of_a_template_is_another_key(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, encoded: list[Path]
) -> None:
    path = tmp_path / "own.jinja"
    keys = []
    for text in ("a{{ messages[0].content }}", "b{{ messages[0].content }}", "a{{ messages[0].content }}"):
        path.write_text(text)
        settings = {"template": str(path), "texts": "user"}
        keys.append(texts(chat, read_prompts(chat, tmp_path / "cache", {"path": str(file)}, chat=settings))[0])
    assert keys == ["a0+1=", "b0+1=", "a0+1="]
    assert len(encoded) == 2


def test_another_template_of_tools_is_another_key(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, encoded: list[Path]
) -> None:
    tokenizer = copy.deepcopy(chat)
    for named in ("a", "b", "a"):
        tokenizer.chat_template = {"default": "x", "tool_use": f"{named}{{{{ tools }}}}"}
        read_prompts(tokenizer, tmp_path / "cache", {"path": str(file)})
    assert len(encoded) == 2


@pytest.mark.parametrize("library", ["tokenizers", "transformers", "jinja2"])
def test_another_version_of_a_library_is_another_key(
    tmp_path: Path,
    file: Path,
    chat: PreTrainedTokenizerBase,
    encoded: list[Path],
    library: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_prompts(chat, tmp_path / "cache", {"path": str(file)})

    class Other:
        __version__ = "0.0"

        def __getattr__(self, name: str) -> Any:
            return getattr(sys.modules[library], name)

    monkeypatch.setattr(encoding, library, Other())
    read_prompts(chat, tmp_path / "cache", {"path": str(file)})
    assert len(encoded) == 2


@pytest.mark.slow
def test_what_was_half_encoded_is_never_read(
    tmp_path: Path, chat: PreTrainedTokenizerBase, encoded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{n}", "answer": ""} for n in range(3000)])
    real, calls = encoding._Writer._keep, []

    def fails(self: Any, *rest: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, *rest)

    monkeypatch.setattr(encoding._Writer, "_keep", fails)
    with pytest.raises(KeyboardInterrupt):
        read_prompts(chat, tmp_path / "cache", {"path": str(path)})
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    monkeypatch.setattr(encoding._Writer, "_keep", real)
    assert len(read_prompts(chat, tmp_path / "cache", {"path": str(path)})) == 3000


def test_what_a_killed_process_left_is_never_read(
    tmp_path: Path, file: Path, chat: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(encoding._Writer, "summary", killed)
        patched.setattr(opening.shutil, "rmtree", lambda *_, **__: None)  # as nobody cleans up after a kill
        with pytest.raises(KeyboardInterrupt):
            read_prompts(chat, tmp_path / "cache", {"path": str(file)})
    [left] = (tmp_path / "cache" / "tokens").iterdir()
    assert left.name.startswith(".") and (left / "tokens.bin").stat().st_size
    assert texts(chat, read_prompts(chat, tmp_path / "cache", {"path": str(file)})) == [f"{n}+1=" for n in range(8)]


def test_rows_are_kept_once_for_all_settings(
    tmp_path: Path, chat: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": "b"}]), tmp_path / "a.parquet")
    read_prompts(chat, tmp_path / "cache", {"path": str(tmp_path / "a.parquet")})
    monkeypatch.setattr(opening, "_from_parquet", None)  # would raise
    read_prompts(chat, tmp_path / "cache", {"path": str(tmp_path / "a.parquet"), "answer": None})
