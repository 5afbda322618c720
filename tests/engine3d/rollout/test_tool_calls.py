"""Calls that SGLang's parsers read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.rollout.tool_calls import CallsOfText, ToolCall, ToolCallReader, find_parser
from hybridflow.data.tokenizer import make_chat_tokenizer

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = [{"type": "function", "function": {"name": "price", "description": "A price.", "parameters": PARAMETERS}}]
AB = '{"code": "ab"}'


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("pythonic", 'Well. [price(code="ab")]', (ToolCall("price", AB),)),
        ("qwen25", f'<tool_call>\n{{"name": "price", "arguments": {AB}}}\n</tool_call>', (ToolCall("price", AB),)),
        ("llama3", f'<|python_tag|>{{"name": "price", "parameters": {AB}}}', (ToolCall("price", AB),)),
        ("mistral", f'[TOOL_CALLS] [{{"name": "price", "arguments": {AB}}}]', (ToolCall("price", AB),)),
        ("pythonic", '[cost(code="ab")]', (ToolCall("cost", AB),)),  # there is none: the model is told so
        ("pythonic", '[price(code="a"), price(code="b")]', (
            ToolCall("price", '{"code": "a"}'), ToolCall("price", '{"code": "b"}'))),
        ("pythonic", "42", ()),
    ],
)  # fmt: skip
def test_calls_of_families(parser: str, text: str, expected: tuple[ToolCall, ...]) -> None:
    read = ToolCallReader(parser, TOOLS).read(text)
    assert read.calls == expected and not read.malformed


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen25", '<tool_call>\n{"name": "price", "arguments": {code: 1}}\n</tool_call>'),
        ("qwen25", "<tool_call>\n[1]\n</tool_call>"),
        ("qwen25", '<tool_call>\n{"name": "price"'),  # no tokens were left
    ],
)
def test_calls_that_cannot_be_read(parser: str, text: str) -> None:
    read = ToolCallReader(parser, TOOLS).read(text)
    assert read.malformed and not read.calls
    assert "SGLANG_FORWARD_UNKNOWN_TOOLS" not in os.environ  # which processes of this one would have


def test_no_text_takes_long_to_read() -> None:
    commas = ", ".join(f"a{number}={number}" for number in range(200))
    reader = ToolCallReader("pythonic", TOOLS)
    assert reader.read(f'[price(code="f({commas})")]').calls[0].arguments == f'{{"code": "f({commas})"}}'
    assert not reader.read("[price(code=" + "a=," * 300).calls
    assert not reader.read("[A(A=" + "\t)A(A=,\t" * 25).calls


def test_a_reader_has_no_state_between_texts() -> None:
    reader = ToolCallReader("pythonic", TOOLS)
    assert reader.read('[price(code="ab")]') == reader.read('[price(code="ab")]') != CallsOfText("")


def test_the_parser_of_a_template(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    assert find_parser("qwen25", None, tokenizer, "parser") == "qwen25"
    with pytest.raises(UserError, match=r"^parser=qwen: SGLang has no such parser|^parser=quen: .*expected one of"):
        find_parser("quen", None, tokenizer, "parser")
    with pytest.raises(UserError, match="parser is not set, and SGLang knows no parser for this chat template"):
        find_parser(None, tokenizer.chat_template, tokenizer, "parser")
