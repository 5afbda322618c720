"""Conversations as they were drawn, compared with what a template makes of their messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.rollout.tool_calls import CallsOfText, ToolCall
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.conversation_check import ConversationCheck, Exchange
from hybridflow.environments.observation_tokens import ObservationTokens, tool_messages
from tests.hybridflow.environments.tools.test_tool_environment import TEMPLATE, TOOL

FORGETS = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.role == "assistant" and not loop.last %}{{ message.content.split("~")[-1] }}
{%- else %}{{ message.content }}{% endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def _check(directory: Path, template: str | None = None) -> ConversationCheck:
    tokenizer = make_chat_tokenizer(directory / "tokenizer")
    config = ChatConfig()
    if template is not None:
        (directory / "template.jinja").write_text(template.strip())
        config = ChatConfig(template=directory / "template.jinja")
    return ConversationCheck(ObservationTokens(tokenizer, ChatTemplate(config, tokenizer), "user"))


def _exchange(check: ConversationCheck, turn: str, following: str = "", answer: str = "") -> Exchange:
    tokenizer = check.tokens._tokenizer
    return Exchange(tokenizer.encode(turn), CallsOfText(""), tokenizer.encode(following), [answer] if following else ())


def test_turns_that_the_template_renders_as_they_are(tmp_path: Path) -> None:
    check = _check(tmp_path)
    assert check.difference(_exchange(check, "4<|end|>", "<|user|>+<|end|><|assistant|>", "+")) is None
    assert check.difference(_exchange(check, "56", "<|end|><|user|>-<|end|><|assistant|>", "-")) is None
    assert check.difference(_exchange(check, "5")) is None


def test_a_separator_that_was_dropped_is_a_difference(tmp_path: Path) -> None:
    check = _check(tmp_path)
    assert check.difference(_exchange(check, "4", "<|user|>+<|end|><|assistant|>", "+")) is None  # of the turn alone
    difference = check.difference(_exchange(check, "5<|end|>"))
    assert difference is not None
    assert "is '<|assistant|>4<|user|>+" in difference and "makes '<|assistant|>4<|end|><|user|>+" in difference


def test_a_template_that_forgets_what_was_thought_is_a_difference(tmp_path: Path) -> None:
    check = _check(tmp_path, FORGETS)
    assert check.difference(_exchange(check, "why~4<|end|>", "<|user|>+<|end|><|assistant|>", "+")) is None
    difference = check.difference(_exchange(check, "5<|end|>"))
    assert (
        difference is not None and "<|assistant|>why~4<|end|>" in difference and "<|assistant|>4<|end|>" in difference
    )


@pytest.mark.parametrize(("written", "same"), [('[echo(a="b")]', True), ("[echo(a='b')]", False)])
def test_calls_are_compared_as_the_template_writes_them(tmp_path: Path, written: str, same: bool) -> None:
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    tokens = ObservationTokens(tokenizer)
    tools = {"functions": ["a:b"], "reward": "arithmetic", "parser": "pythonic"}
    config = EnvironmentConfig.model_validate({"tools": tools})
    tokens.tools = tool_messages(config, ChatConfig(template=TEMPLATE), [TOOL], tokenizer)
    calls = CallsOfText("", (ToolCall("echo", '{"a": "b"}'),))
    difference = ConversationCheck(tokens).difference(Exchange(tokenizer.encode(f"{written}<|end|>"), calls))
    assert (difference is None) is same
