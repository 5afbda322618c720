"""Supervised rows of files: the tokens to train on, and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import FilesConfig
from hybridflow.data.files.conversations.supervised import SupervisedFiles, encode_supervised
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.trainer.startup.sft_warmup import answered

ASKED = [{"role": "user", "content": "1+1"}]
CONVERSATION = [
    *ASKED,
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3+4"},
    {"role": "assistant", "content": "7"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encoded(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    chat: dict[str, Any] | None = None,
    *,
    most: int = 100,
    policy: OverlongPolicy = "refuse",
    **source: Any,
) -> SupervisedFiles:
    (directory / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"path": str(directory / "sft.jsonl"), **source}
    config = FilesConfig(train=(given,), sft=(given,), chat=chat or {}, cache=directory / "cache")  # type: ignore[arg-type]
    return encode_supervised(config.sft, config, tokenizer, max_tokens=most, policy=policy)


def trained_on(files: SupervisedFiles, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> list[tuple[bool, str]]:
    """Spans of an answer: (true if trained on, text)."""
    spans: list[tuple[bool, list[int]]] = []
    for token, taken in zip(files.answers[index], files.masks[index], strict=True):
        if not spans or spans[-1][0] != taken:
            spans.append((taken, []))
        spans[-1][1].append(token)
    return [(taken, str(tokenizer.decode(tokens))) for taken, tokens in spans]


def test_every_message_of_the_assistant_is_trained_on_and_nothing_between(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    files = encoded(tmp_path, tokenizer, [{"prompt": CONVERSATION}])
    assert tokenizer.decode(files.prompts.tokens[0]) == "<|user|>1+1<|end|><|assistant|>"
    assert trained_on(files, tokenizer) == [
        (True, "2<|end|>"),
        (False, "<|user|>3+4<|end|><|assistant|>"),
        (True, "7<|end|>"),
    ]
    batch = answered([files.prompts.tokens[0]], [files.answers[0]], [files.masks[0]])
    assert batch.sums(batch.response_mask).tolist() == [4]


def test_only_the_last_message_is_trained_on_by_choice(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = encoded(tmp_path, tokenizer, [{"prompt": CONVERSATION}], {"train_on": "last"})
    prompt = "<|user|>1+1<|end|><|assistant|>2<|end|><|user|>3+4<|end|><|assistant|>"
    assert tokenizer.decode(files.prompts.tokens[0]) == prompt
    assert trained_on(files, tokenizer) == [(True, "7<|end|>")]


def test_an_answer_is_what_the_assistant_says_to_a_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows: list[dict[str, Any]] = [{"prompt": ASKED, "answer": 2}, {"prompt": "1+1=", "answer": "two"}]
    files = encoded(tmp_path, tokenizer, rows, {"system": "Add."})
    prompts = [str(tokenizer.decode(tokens)) for tokens in files.prompts.tokens]
    assert prompts == ["<|system|>Add.<|end|><|user|>1+1<|end|><|assistant|>", "1+1="]
    assert [trained_on(files, tokenizer, row) for row in range(2)] == [[(True, "2<|end|>")], [(True, "two<|end|>")]]
    files = encoded(tmp_path, tokenizer, rows[1:], {"texts": "user"})
    assert tokenizer.decode(files.prompts.tokens[0]) == "<|user|>1+1=<|end|><|assistant|>"
    assert (files.prompts.examples[0].prompt, files.prompts.examples[0].answer) == (
        "<|user|>1+1=<|end|><|assistant|>",
        "two<|end|>",
    )


@pytest.mark.parametrize("name", ["weight", "train", "loss"])
def test_a_message_of_weight_0_is_not_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    user, first, again, last = CONVERSATION
    files = encoded(tmp_path, tokenizer, [{"prompt": [user, first | {name: 0}, again, last | {name: 1}]}])
    prompt = "<|user|>1+1<|end|><|assistant|>2<|end|><|user|>3+4<|end|><|assistant|>"
    assert tokenizer.decode(files.prompts.tokens[0]) == prompt
    assert trained_on(files, tokenizer) == [(True, "7<|end|>")]
    files = encoded(tmp_path, tokenizer, [{"prompt": [user | {name: 0}, first, again, last | {name: False}]}])
    assert trained_on(files, tokenizer) == [(True, "2<|end|>")]
    for messages, message in (
        ([user, first | {name: 0}], "all messages of the assistant have weight 0, expected one to train on"),
        ([user, first | {name: 0.5}], f"message 2 has {name} 0.5, expected 0 or 1"),
        (
            [user | {name: 1}, first],
            "message 1 has a weight and role user, expected it of messages of the assistant",
        ),
    ):
        with pytest.raises(UserError, match=f"sft.jsonl:1: {message}"):
            encoded(tmp_path, tokenizer, [{"prompt": messages}])


def test_an_answer_may_be_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": CONVERSATION[:3], "completion": [CONVERSATION[3]]}
    for given in (row, row | {"completion": json.dumps(row["completion"])}):
        files = encoded(tmp_path, tokenizer, [given], answer="completion")
        assert trained_on(files, tokenizer) == [(True, "7<|end|>")]


def test_a_conversation_of_from_and_value(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    said = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]
    files = encoded(tmp_path, tokenizer, [{"conversations": said}], prompt="conversations")
    assert trained_on(files, tokenizer) == [(True, "2<|end|>")]


def test_tools_of_a_conversation_are_read_and_not_trained_on(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + str(bpe.chat_template))
    row = {"prompt": CONVERSATION[:2], "tools": [{"name": "add"}]}
    files = encoded(tmp_path, bpe, [row], {"template": template}, tools="tools")
    assert str(bpe.decode(files.prompts.tokens[0])).startswith('[{"name": "add"}]<|im_start|>user')
    assert trained_on(files, bpe) == [(True, "2<|im_end|>")] and files.prompts.spans[0].with_tools == 1
    [span] = encoded(tmp_path, bpe, [row], {"template": template}).prompts.spans
    assert span.remarks == {"tools": (1, f"{tmp_path}/sft.jsonl:1")}


def test_nothing_stands_between_a_text_and_its_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    appending = copy.deepcopy(tokenizer)
    special = [("<bos>", 1), ("<|end|>", 2)]
    appending.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <|end|>", special_tokens=special)
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2<|end|>\n"}]
    files = encoded(tmp_path, appending, rows)
    assert [appending.decode(tokens) for tokens in files.prompts.tokens] == ["<bos>1+1="] * 2
    assert [trained_on(files, appending, row) for row in range(2)] == [[(True, "2<|end|>")]] * 2


def test_an_answer_with_an_end_in_it_is_reported(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("2<|end|>", "2<|end|><|user|>b", "2")]
    [span] = encoded(tmp_path, tokenizer, [*rows, {"prompt": CONVERSATION, "answer": ""}]).prompts.spans
    assert span.remarks == {"inner": (1, f"{tmp_path}/sft.jsonl:2")}


def test_what_is_too_long_is_refused_or_dropped_but_never_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2" * 50}]
    with pytest.raises(UserError, match=r"sft.jsonl:2: the supervised example has 55 tokens, expected at most 10"):
        encoded(tmp_path, tokenizer, rows, most=10)
    files = encoded(tmp_path, tokenizer, rows, most=10, policy="cut_left")
    assert len(files.prompts) == len(files.answers) == len(files.masks) == 1 and files.prompts.overlong == 1
    assert files.prompts.spans[0].dropped == {"more than 10 tokens": 1}


def test_a_template_that_renders_earlier_messages_differently_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = tmp_path / "shortening.jinja"
    template.write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% if message.role == 'user' or loop.last %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(UserError, match=r"sft.jsonl:1: the chat template renders the beginning .* differently"):
        encoded(tmp_path, tokenizer, [{"prompt": CONVERSATION}], {"template": template})
    files = encoded(tmp_path, tokenizer, [{"prompt": CONVERSATION}], {"template": template, "train_on": "last"})
    assert trained_on(files, tokenizer) == [(True, "7<|end|>")]


def test_a_template_without_the_end_of_a_sequence_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text(
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(UserError, match=r"without the tokenizer's end-of-sequence token '<\|end\|>'"):
        encoded(tmp_path, tokenizer, [{"prompt": CONVERSATION}], {"template": template})


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"prompt": "1+1="}, {}, "no column 'answer', only 'prompt'"),
        ({"prompt": "1+1="}, {"answer": None}, "the prompt ends without an answer, and answer is null"),
        (
            {"prompt": "1+1=", "answer": [2]},
            {},
            "column 'answer' is [2], expected a text or a whole number to train on",
        ),
        ({"prompt": [{"role": "assistant", "content": "2"}]}, {}, "no message of the assistant after another"),
    ],
)
def test_a_row_that_is_no_example_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        encoded(tmp_path, tokenizer, [row], **source)
    assert f"{tmp_path / 'sft.jsonl'}:1: " in str(caught.value) and message in str(caught.value)


def with_call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]}
    return [*ASKED, called, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]


@pytest.mark.parametrize("format", ["parquet", "dataset"])
def test_calls_of_tools_are_learned_with_their_own_arguments_from_every_format(
    tmp_path: Path, bpe: PreTrainedTokenizerBase, format: str
) -> None:
    import datasets

    rows = [{"prompt": with_call("weather", city="Bonn")}, {"prompt": with_call("add", a=1, b=2)}]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"saved.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    lines, columns = encoded(tmp_path, bpe, rows, most=500), encoded(tmp_path, bpe, rows, most=500, path=str(path))
    assert list(lines.prompts.tokens) == list(columns.prompts.tokens)
    assert list(lines.answers) == list(columns.answers) and list(lines.masks) == list(columns.masks)
    assert trained_on(columns, bpe)[0] == (True, '[{"name": "weather", "arguments": {"city": "Bonn"}}]<|im_end|>')
    with_null = encoded(tmp_path, bpe, [{"prompt": with_call("weather", city=None)}], most=500)
    assert '{"city": null}' in trained_on(with_null, bpe)[0][1]  # a line of JSON says so itself
