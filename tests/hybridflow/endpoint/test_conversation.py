"""Conversations as tokens: what the policy has drawn stays as it is, whatever an agent makes of its text."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.endpoint.conversation import SessionTokens
from hybridflow.environments.agents.host import agent_template
from tests.support.runs import ROOT


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def conversation(tokenizer: PreTrainedTokenizerBase) -> SessionTokens:
    return SessionTokens(tokenizer, agent_template(None, tokenizer))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _draw(conversation: SessionTokens, messages: list[dict[str, Any]], tokens: list[int]) -> tuple[int, list[int]]:
    """Sequence of the answer, and the tokens that it was given. Appends the answer to the messages."""
    position = conversation.of_messages(messages, ())
    drawn = conversation.answer(position, tokens, complete=True, messages=True)
    messages.append(drawn.message)
    return position.branch.sequence, position.branch.tokens


def test_a_conversation_is_one_sequence_of_what_was_drawn(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "system", "content": "s"}, _user("1-7")]
    with_bos = [1, *tokenizer.encode("4<|end|>")]  # its text would be encoded without the first
    assert tokenizer.decode(with_bos, skip_special_tokens=True) == "4"
    assert _draw(conversation, messages, with_bos) == (
        0, tokenizer.encode("<|system|>s<|end|><|user|>1-7<|end|><|assistant|>"),
    )  # fmt: skip
    messages.append(_user("+"))
    assert _draw(conversation, messages, tokenizer.encode("6<|end|>")) == (
        0, tokenizer.encode("<|user|>+<|end|><|assistant|>"),
    )  # fmt: skip
    assert conversation.tree.tokens == len(
        [*tokenizer.encode("<|system|>s<|end|><|user|>1-7<|end|><|assistant|>"), *with_bos]
    ) + len(tokenizer.encode("<|user|>+<|end|><|assistant|>6<|end|>"))


def test_an_answer_without_its_end_gets_it_from_the_template(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [_user("1")]
    _draw(conversation, messages, tokenizer.encode("4"))
    messages.append(_user("+"))
    assert _draw(conversation, messages, [9]) == (0, tokenizer.encode("<|end|><|user|>+<|end|><|assistant|>"))


@pytest.mark.parametrize(
    ("turn", "difference"),
    [("4<|end|>", None), ("4<|user|>2<|end|>", "is '|><|assistant|>4<|user|>2<|end|>")],
)
def test_what_the_template_renders_otherwise_is_a_difference(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase, turn: str, difference: str | None
) -> None:
    messages = [_user("1")]
    _draw(conversation, messages, tokenizer.encode(turn))
    conversation.of_messages([*messages, _user("+")], ())
    assert (conversation.difference or "").startswith(difference or "")
    assert (conversation.difference is None) == (difference is None)


@pytest.mark.parametrize("token", [-1, 10**30])
def test_tokens_that_are_none_are_refused(conversation: SessionTokens, token: int) -> None:
    with pytest.raises(UserError, match=f"prompt: token {token}, expected 0 to"):
        conversation.of_text([1, token])


def test_white_space_that_an_agent_strips_splits_nothing(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [_user("1")]
    _draw(conversation, messages, tokenizer.encode(" 4\n<|end|>"))
    messages[-1] = {"role": "assistant", "content": [{"type": "text", "text": "4"}], "refusal": None}
    messages.append(_user("+"))
    assert _draw(conversation, messages, [9])[0] == 0


def test_a_conversation_that_diverges_is_a_branch_and_the_first_goes_on(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [_user("1")]
    _draw(conversation, messages, tokenizer.encode("4<|end|>"))
    one, other = [*messages, _user("+")], [*messages, _user("-")]
    edited = [messages[0], {"role": "assistant", "content": "5"}, _user("+")]
    sub_agent = [_user("look")]
    assert _draw(conversation, one, tokenizer.encode("6<|end|>"))[0] == 0
    sequence, tokens = _draw(conversation, other, tokenizer.encode("2<|end|>"))
    assert sequence == 1
    assert tokenizer.decode(tokens) == "<|user|>1<|end|><|assistant|>4<|end|><|user|>-<|end|><|assistant|>"
    assert _draw(conversation, edited, tokenizer.encode("7<|end|>"))[0] == 2
    assert _draw(conversation, sub_agent, tokenizer.encode("7<|end|>"))[0] == 3
    for number, branch in enumerate((one, other, edited, sub_agent)):
        branch.append(_user("more"))
        assert _draw(conversation, branch, tokenizer.encode("8<|end|>"))[0] == number


def test_a_text_continues_the_tokens_of_the_text_before(
    conversation: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = conversation.of_text("1-7 ")
    drawn = conversation.answer(first, [1, *tokenizer.encode("4")], complete=False, messages=False)
    assert drawn.content == "4" and drawn.finish_reason == "length"
    second = conversation.of_text("1-7 4+")
    assert (second.branch.sequence, second.branch.tokens) == (0, tokenizer.encode("+"))
    assert conversation.of_text("1-7 5").branch.sequence == 1
    tokens = [*first.context, 1, *tokenizer.encode("4"), 20]
    assert conversation.of_text(tokens).branch.tokens == [20]


TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {"article": {"type": "string"}},
    }}}
    for name in ("price", "stock")
]  # fmt: skip


@pytest.fixture
def with_tools(tokenizer: PreTrainedTokenizerBase) -> SessionTokens:
    template = agent_template(ChatConfig(template=ROOT / "launch/recipes/data/tools.jinja"), tokenizer)
    return SessionTokens(tokenizer, template, "pythonic")


def test_calls_of_tools_are_read_and_their_answers_follow_what_was_drawn(
    with_tools: SessionTokens, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [_user("ab")]
    position = with_tools.of_messages(messages, TOOLS)
    assert str(tokenizer.decode(list(position.context))).endswith("<|user|>ab<|end|><|assistant|>")
    turn = tokenizer.encode('[price(article="ab"), stock( article="ab")]<|end|>')
    drawn = with_tools.answer(position, turn, complete=True, messages=True)
    assert (drawn.content, drawn.finish_reason, drawn.called) == (None, "tool_calls", ["price", "stock"])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in drawn.tool_calls]
    assert calls == [("price", '{"article": "ab"}'), ("stock", '{"article": "ab"}')]
    assert len({call["id"] for call in drawn.tool_calls}) == 2
    rewritten = [
        {**call, "function": {"name": call["function"]["name"], "arguments": '{"article":"ab"}'}}
        for call in drawn.tool_calls
    ]
    messages.append({"role": "assistant", "tool_calls": rewritten})
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(rewritten, ("42", "7"), strict=True)
    ]
    messages += reversed(answers)  # in another order than the calls
    second = with_tools.of_messages(messages, TOOLS)
    assert second.branch.sequence == 0
    assert tokenizer.decode(second.branch.tokens) == "<|tool|>42<|end|><|tool|>7<|end|><|assistant|>"
    assert list(second.context) == [*position.context, *turn, *second.branch.tokens]
    last = with_tools.answer(second, tokenizer.encode("42<|end|>"), complete=True, messages=True)
    assert (last.content, last.finish_reason) == ("42", "stop")
    messages = [dict(message) for message in messages]
    messages[1]["tool_calls"] = [{name: call[name] for name in ("type", "function")} for call in rewritten]
    for message in messages[2:]:
        message.pop("tool_call_id")
    without_ids = with_tools.of_messages(messages, TOOLS)
    text = str(tokenizer.decode(list(without_ids.context)))
    assert text.endswith('article="ab")]<|end|><|tool|>7<|end|><|tool|>42<|end|><|assistant|>')
    # An agent that does not answer all calls, or that gets other tools.
    with pytest.raises(UserError, match="2 calls of tools are followed by 1 answers of tools and 0 other messages"):
        with_tools.of_messages(messages[:-1], TOOLS)
    assert with_tools.of_messages(messages[:1], TOOLS[:1]).branch.sequence == 1


@pytest.mark.parametrize("text", ["[price(article=", "[price(article=x)]", "[1, 2]"])
def test_calls_that_cannot_be_read_stay_text(
    with_tools: SessionTokens, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    position = with_tools.of_messages([_user("ab")], TOOLS)
    drawn = with_tools.answer(position, tokenizer.encode(text), complete=False, messages=True)
    assert (drawn.content, drawn.tool_calls, drawn.finish_reason) == (text, (), "length")


def test_tools_without_a_parser_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = SessionTokens(tokenizer, agent_template(None, tokenizer))
    with pytest.raises(UserError, match="SGLang knows no parser for this chat template"):
        tokens.of_messages([_user("ab")], TOOLS)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([_user("1"), {"role": "assistant", "content": "2"}], "the last message is the assistant's"),
        ([], "expected a list of messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "has a part of type 'image_url'"),
        ([{"role": "critic", "content": "x"}], "has role 'critic'"),
        ([_user("ä")], "cannot be encoded"),
    ],
)
def test_messages_that_have_no_tokens_are_refused(
    conversation: SessionTokens, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        conversation.of_messages(messages, ())
