"""Pairs of responses: from files and of the arithmetic task, and as tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.config import ArithmeticConfig, DataConfig, OverlongPolicy, PairsConfig
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.given_responses import GivenResponses, encode_pairs, pair_notes
from hybridflow.data.pairs import Pair, load_better_responses, load_held_out_pairs, load_pairs, read_pairs
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS, load_held_out, load_splits
from hybridflow.data.tokenizer import make_character_tokenizer, make_chat_tokenizer

GOOD = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    return make_character_tokenizer(ARITHMETIC_CHARACTERS, directory)


def config(path: Path, **fields: Any) -> PairsConfig:
    return PairsConfig(train_path=path, eval_path=path, **fields)


def read(path: Path, text: str, *, unpaired: bool = False, **fields: Any) -> list[Pair]:
    path.write_text(text)
    return read_pairs(path, config(path, **fields), unpaired=unpaired)


def a_pair(prompt: Any, chosen: Any, rejected: Any, location: str = "p:1") -> Pair:
    return Pair(prompt, chosen, rejected, location)


def encoded(tokenizer: PreTrainedTokenizerBase, *pairs: Pair, **settings: Any) -> GivenResponses:
    usual: dict[str, Any] = {"context": 12, "policy": "refuse", "same": "refuse", "unpaired": False}
    return encode_pairs(tokenizer, pairs, **usual | settings)


# Files


def test_pairs_in_order_with_the_named_fields_as_texts_or_tokens(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"q": "1+1=", "good": "2", "bad": "3", "more": 0}, {"q": [5, 6], "good": [7], "bad": [8, 9]}]
    text = "\n\n".join(map(json.dumps, lines))
    pairs = read(path, text, prompt_field="q", chosen_field="good", rejected_field="bad")
    assert pairs == [a_pair("1+1=", "2", "3", f"{path}:1"), a_pair([5, 6], [7], [8, 9], f"{path}:3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "chosen": "2"}', "no field 'rejected', only 'prompt', 'chosen'"),
        ('{"prompt": "x", "rejected": "2"}', "no field 'chosen', only"),
        ('{"chosen": "x", "rejected": "2"}', "no field 'prompt', only"),
        ("{}", "no field 'prompt', only an empty object"),
        (
            '{"prompt": "", "chosen": "1", "rejected": "2"}',
            "field 'prompt' is '', expected a non-empty string, a list",
        ),
        (
            '{"prompt": "x", "chosen": "", "rejected": "2"}',
            "field 'chosen' is '', expected a non-empty string, a list",
        ),
        ('{"prompt": "x", "chosen": "1", "rejected": []}', "field 'rejected' is [], expected a non-empty string"),
        ('{"prompt": "x", "chosen": null, "rejected": "2"}', "field 'chosen' is null"),
        ('{"prompt": "x", "chosen": [1, -2], "rejected": "2"}', "field 'chosen' is [1, -2], expected"),
        ('{"prompt": "x", "chosen": [true], "rejected": "2"}', "field 'chosen' is [true], expected"),
        ('{"prompt": ["user"], "chosen": "1", "rejected": "2"}', "field 'prompt' is [\"user\"], expected"),
        ("[1]", "a list, expected an object"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    with pytest.raises(UserError) as caught:
        read(path, f"{GOOD}\n{line}\n")
    assert f"{path}:2: " in str(caught.value) and message in str(caught.value)


def test_one_response_is_enough_only_without_pairs(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = '{"prompt": "x", "chosen": "1"}\n{"prompt": "y", "rejected": "2"}\n'
    assert read(path, lines, unpaired=True) == [
        a_pair("x", "1", None, f"{path}:1"),
        a_pair("y", None, "2", f"{path}:2"),
    ]
    with pytest.raises(UserError, match="no field 'chosen' or 'rejected', only 'prompt'"):
        read(path, '{"prompt": "x"}', unpaired=True)
    pairs = read(tmp_path / "p.csv", "prompt,chosen,rejected\nx,1,\ny,,2\n", unpaired=True)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [("1", None), (None, "2")]


def test_a_file_that_cannot_serve_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read pairs from .*none\.jsonl"):
        read_pairs(tmp_path / "none.jsonl", config(tmp_path / "none.jsonl"), unpaired=False)
    with pytest.raises(UserError, match="holds no rows, expected one JSON object a line"):
        read(tmp_path / "p.jsonl", "\n")


def test_pairs_of_files_and_supervised_examples_of_their_better_responses(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(GOOD)
    data = DataConfig(source="pairs", pairs=config(path, sft_path=path))
    train, held_out = load_pairs(data, unpaired=False), load_held_out_pairs(data, unpaired=False)
    assert train == held_out == [a_pair("1+1=", "2", "3", f"{path}:1")]
    rows = [{"prompt": "1+1=", "chosen": "2"}, {"prompt": "2+2=", "chosen": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    for supervised, count in ((path, 1), (tmp_path / "p.parquet", 2)):
        examples = load_better_responses(config(path, sft_path=supervised))
        assert [(example.prompt, example.answer) for example in examples] == [("1+1=", "2"), ("2+2=", "4")][:count]
    assert load_better_responses(config(path)) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "rejected": "1"}, "1: field 'chosen' is not there, expected the text"),
        ({"prompt": [3], "chosen": "1"}, "1: field 'prompt' has token ids, expected the text"),
        (
            {"prompt": "x", "chosen": [{"role": "assistant", "content": "1"}]},
            "1: field 'prompt' has messages, expected the text",
        ),
    ],
)
def test_a_supervised_example_without_texts_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=re.escape(message)):
        load_better_responses(config(path, sft_path=path))


def test_pairs_of_messages_are_rendered_by_the_template(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    question = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    good, bad = ({"role": "assistant", "content": answer} for answer in "23")
    rows = [
        {"prompt": question, "chosen": [good], "rejected": [bad]},  # the responses alone,
        {"prompt": question, "chosen": [*question, good], "rejected": [*question, bad]},  # with the prompt before them,
        {"prompt": None, "chosen": [*question, good], "rejected": [*question, bad]},  # and without a column of prompts
    ]
    path = tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:2]), path)
    pairs = read_pairs(path, config(path), unpaired=False)
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text(json.dumps(rows[2]))
    implicit = config(path).model_copy(update={"prompt_field": None})
    pairs += read_pairs(conversations, implicit, unpaired=False)
    given = encode_pairs(tokenizer, pairs, context=60, policy="refuse", same="refuse", unpaired=False)
    prompt = "<|system|>Add.<|end|><|user|>1+1<|end|><|assistant|>"
    assert [tokenizer.decode(tokens) for tokens in given.tokens] == [prompt] * 3
    assert [[tokenizer.decode(tokens) for tokens in both] for both in given.responses] == [["2<|end|>", "3<|end|>"]] * 3
    [cut] = encode_pairs(tokenizer, pairs[:1], context=13, policy="cut_left", same="refuse", unpaired=False).tokens
    assert tokenizer.decode(cut) == prompt.replace("1+1", "+1")


def test_calls_of_tools_in_pairs_have_their_own_arguments_from_every_format(tmp_path: Path) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        called = {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}
        return {
            "prompt": [{"role": "user", "content": "1+1"}],
            "chosen": [called],
            "rejected": [{"role": "assistant", "content": "3"}],
        }

    rows, path = [row("weather", city="Bonn"), row("add", a=1, b=2)], tmp_path / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    lines = read(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)))
    columns = read_pairs(path, config(path), unpaired=False)
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in columns] == [
        (pair.prompt, pair.chosen, pair.rejected) for pair in lines
    ]
    [pair] = read(tmp_path / "p.jsonl", json.dumps(row("weather", city=None)))
    assert pair.chosen == row("weather", city=None)["chosen"]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_prompt_and_response_of_a_pair_are_the_tokens_of_the_whole(tmp_path: Path, generation_prompt: bool) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    question = [{"role": "user", "content": "1+1"}]
    good, bad = ([{"role": "assistant", "content": answer}] for answer in "23")
    chat = ChatConfig(generation_prompt=generation_prompt)
    given = encoded(tokenizer, a_pair(question, good, bad), context=60, chat=chat)
    for response, answer in zip(given.responses[0], "23", strict=True):
        complete = f"<|user|>1+1<|end|><|assistant|>{answer}<|end|>"
        assert given.tokens[0] + response == tokenizer.encode(complete, add_special_tokens=False)


def test_settings_of_chat_that_say_nothing_of_pairs_are_refused(tmp_path: Path) -> None:
    for name, value in (("texts", "user"), ("train_on", "last")):
        with pytest.raises(ValueError, match=rf"chat\.{name}={value}, where .*; expected"):
            config(tmp_path / "p.jsonl", chat={name: value})
    tokenizer, chat = make_chat_tokenizer(tmp_path / "tokenizer"), ChatConfig(system="Add.")
    message = "p:1: the prompt is no messages, and data.pairs.chat.system is set; expected them"
    with pytest.raises(UserError, match=f"^{message}$"):
        encoded(tokenizer, a_pair("1+1=", "2", "3"), chat=chat)


def test_a_response_that_is_no_answer_to_its_prompt_is_refused(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    question = [{"role": "user", "content": "1+1"}]
    pair = Pair(question, [{"role": "assistant", "content": "2"}, *question], [1], "p.jsonl:1")
    with pytest.raises(UserError, match=r"p.jsonl:1: a response of 2 messages, expected one of the assistant"):
        encode_pairs(tokenizer, [pair], context=60, policy="refuse", same="refuse", unpaired=False)


# The arithmetic task


def test_arithmetic_pairs_are_of_the_task_s_problems_right_against_wrong() -> None:
    data = DataConfig(arithmetic=ArithmeticConfig(train_size=50, eval_size=20))
    pairs, held_out = load_pairs(data, unpaired=False), load_held_out_pairs(data, unpaired=False)
    assert [pair.prompt for pair in pairs] == [example.prompt for example in load_splits(data).train]
    assert [pair.chosen for pair in held_out] == [example.answer for example in load_held_out(data)]
    assert {abs(int(str(pair.chosen)) - int(str(pair.rejected))) for pair in pairs} == {1, 10}
    assert pairs == load_pairs(data, unpaired=True)


# Tokens


def test_texts_end_with_the_end_and_tokens_stay_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    given = encoded(tokenizer, a_pair("1+1=", "2", "13"), a_pair([5, 6], [7], [8, 9], "p:2"))
    end, digits = tokenizer.eos_token_id, [tokenizer.convert_tokens_to_ids(digit) for digit in "213"]
    assert given.responses == [([digits[0], end], [digits[1], digits[2], end]), ([7], [8, 9])]
    assert given.tokens == [tokenizer.encode("1+1="), [5, 6]]
    assert given.rewards == [(1.0, 0.0), (1.0, 0.0)]
    assert given.examples[0].answer == ["2", "13"]


def test_pairs_without_a_difference_are_refused_or_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [a_pair("1+1=", "2", "3"), a_pair("1+2=", "3", "3", "p:2"), a_pair([5], [9], [9], "p:3")]
    expected = "p:2: the better and the worse response are the same; expected two that differ, or "
    with pytest.raises(UserError, match=f"^{expected}data.pairs.same_responses=drop$"):
        encoded(tokenizer, *pairs)
    given = encoded(tokenizer, *pairs, same="drop")
    assert len(given) == len(given.responses) == len(given.rewards) == 1
    assert given.alike == ["p:2", "p:3"]
    assert pair_notes({"training": given}, tokenizer) == [
        "data: 2 of 3 training pairs have the same response twice and are left out; the first is p:2"
    ]
    with pytest.raises(UserError, match=r"p:2: the better and .*, as in all 2 pairs; expected some that differ"):
        encoded(tokenizer, *pairs[1:], same="drop")


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("drop", [[6]]), ("cut_left", [[4, 5], [6]]), ("cut_right", [[3, 4], [6]])],
)
def test_prompts_without_room_for_their_longest_response(
    tokenizer: PreTrainedTokenizerBase, policy: OverlongPolicy, kept: list[list[int]]
) -> None:
    pairs = [a_pair([3, 4, 5], [7], [8, 8]), a_pair([6], [7], [8], "p:2")]
    given = encoded(tokenizer, *pairs, context=4, policy=policy)
    assert given.tokens == kept and given.overlong == 1
    assert len(given.responses) == len(kept)
    with pytest.raises(UserError, match="p:1: the prompt has 3 tokens and its longest response 2, expected at most 4"):
        encoded(tokenizer, *pairs, context=4)


def test_a_response_that_leaves_no_room_for_any_prompt_is_refused_or_dropped(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    pairs = [a_pair([3], [7], [8, 8, 8, 8]), a_pair([6], [7], [8], "p:2")]
    with pytest.raises(UserError, match="p:1: the prompt has 1 tokens and its longest response 4"):
        encoded(tokenizer, *pairs, context=4, policy="cut_left")
    assert encoded(tokenizer, *pairs, context=4, policy="drop").tokens == [[6]]


def test_each_response_of_examples_is_beside_one_to_another_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [a_pair([3], [7, 7, 7], None), a_pair([4, 4], [8], [9, 9], "p:2"), a_pair([4, 4], None, [6], "p:3")]
    given = encoded(tokenizer, *pairs, context=4, unpaired=True)
    # Those to prompt [4, 4] are beside the one to [3], which follows in a circle, and is cut where it does not fit.
    assert given.tokens == [[3], [4, 4], [4, 4], [4, 4]]
    assert given.responses == [([7, 7, 7], [8]), ([8], [7, 7]), ([9, 9], [7, 7]), ([6], [7, 7])]
    assert given.rewards == [(1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [([3], [7], None), ([4], [8], None)],
            "p:1: the response is desirable, as all 2 are; expected some that are un",
        ),
        (
            [([3], None, [7]), ([4], None, [8])],
            "p:1: the response is undesirable, as all 2 are; expected some that are d",
        ),
        ([([3], [7], [8])], "p:1: all 2 examples have the same prompt; expected several"),
    ],
)
def test_examples_that_say_nothing_are_refused(
    tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[Any, Any, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        encoded(tokenizer, *(a_pair(*pair, f"p:{row}") for row, pair in enumerate(pairs, start=1)), unpaired=True)


# Layouts of published pairs


def test_a_prompt_as_text_beside_conversations(tmp_path: Path) -> None:
    path, user = tmp_path / "p.jsonl", {"role": "user", "content": "q"}

    def line(prompt: Any, *before: dict[str, str]) -> str:
        said = {name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
        return json.dumps({"prompt": prompt, **said})

    system = {"role": "system", "content": "s"}
    for before in (
        [user],
        [system, user],
        [user, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    ):
        [pair] = read(path, line("q ", *before))
        assert pair.prompt == before and pair.chosen == [{"role": "assistant", "content": "chosen"}]
    assert read(path, line("q"))[0].prompt == [user]
    assert read(path, line(json.dumps([user]), user))[0].prompt == [user]
    with pytest.raises(
        UserError, match=r"p.jsonl:1: field 'prompt' is a text that is no message of the user before both"
    ):
        read(path, line("other", user))


def test_tools_of_pairs(tmp_path: Path) -> None:
    path, chat = tmp_path / "p.jsonl", make_chat_tokenizer(tmp_path / "tokenizer")
    said = {name: [{"role": "assistant", "content": name[0]}] for name in ("chosen", "rejected")}
    row = {"prompt": [{"role": "user", "content": "q"}], **said, "tools": [{"name": "add"}]}
    given = encoded(chat, *read(path, json.dumps(row)), context=100)
    assert pair_notes({"training": given}, chat) == [
        "data: 1 training pairs have tools in a column 'tools' that the prompts leave out; the setting tools of a "
        f"source (tools_field of pairs) renders them; the first is {path}:1"
    ]
    pairs = read(path, json.dumps(row), tools_field="tools")
    with pytest.raises(UserError, match=r"data\.pairs\.tools_field is set, and the chat template does not read tools"):
        encoded(chat, *pairs, context=100)
    chat.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + str(chat.chat_template)
    given = encoded(chat, *pairs, context=100)
    assert chat.decode(given.tokens[0]) == '[{"name": "add"}]<|user|>q<|end|><|assistant|>'
    assert chat.decode(given.responses[0][0]) == "c<|end|>" and not pair_notes({"training": given}, chat)
    with pytest.raises(UserError, match="field 'tools' has tools, and the prompt is no messages; expected them"):
        read(path, json.dumps({"prompt": "q", "chosen": "a", "rejected": "b", "tools": "[{}]"}), tools_field="tools")


def test_a_response_that_ends_itself_has_no_second_end(tmp_path: Path) -> None:
    chat = make_chat_tokenizer(tmp_path)
    given = encoded(chat, a_pair("q", "x<|end|>", "y"))
    assert [chat.decode(tokens) for tokens in given.responses[0]] == ["x<|end|>", "y<|end|>"]
