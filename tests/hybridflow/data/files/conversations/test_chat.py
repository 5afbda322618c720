"""Messages as text by chat templates, and the spans to train on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate, Rendered
from hybridflow.data.files.conversations.messages import joined

from ..tokenizers import QWEN_LIKE, REFUSING, WITHOUT_SYSTEM

USER = {"role": "user", "content": "1+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "3"}


def template(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> ChatTemplate:
    return ChatTemplate(ChatConfig.model_validate(settings), tokenizer)


def other(tokenizer: PreTrainedTokenizerBase, chat_template: Any) -> PreTrainedTokenizerBase:
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = chat_template
    return copied


def refused(make: Any) -> str:
    with pytest.raises(UserError) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_messages_as_the_template_has_them(chat: PreTrainedTokenizerBase, bpe: PreTrainedTokenizerBase) -> None:
    assert template(chat).prompt([SYSTEM, USER], "f:1") == "<|system|>Be brief.<|end|><|user|>1+2?<|end|><|assistant|>"
    assert template(chat, generation_prompt=False).prompt([USER, ANSWER], "f:1") == (
        "<|user|>1+2?<|end|><|assistant|>3<|end|>"
    )
    assert template(bpe).of_text("1+2?", "f:1") == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"


def test_the_system_prompt_goes_before_messages_that_have_none(chat: PreTrainedTokenizerBase) -> None:
    made = template(chat, system="Think.")
    assert made.prompt([USER], "f:1") == "<|system|>Think.<|end|><|user|>1+2?<|end|><|assistant|>"
    assert made.prompt([SYSTEM, USER], "f:1").startswith("<|system|>Be brief.<|end|><|user|>")
    assert "Think." not in made.prompt([{"role": "developer", "content": "x"}, USER], "f:1")


def test_arguments_reach_the_template(bpe: PreTrainedTokenizerBase) -> None:
    end = "<think>\n\n</think>\n\n"
    assert template(bpe, arguments={"enable_thinking": False}).prompt([USER], "f:1").endswith(f"assistant\n{end}")
    for arguments in ({}, {"enable_thinking": True}):
        assert template(bpe, arguments=arguments).prompt([USER], "f:1").endswith("assistant\n")
    message = refused(lambda: template(bpe, arguments={"enable_thinkin": False}))
    assert message == (
        "data.files.chat.arguments: the chat template does not read 'enable_thinkin'; expected one of enable_thinking"
    )


def test_an_argument_of_a_template_that_has_none(chat: PreTrainedTokenizerBase) -> None:
    begin = "data.files.chat.arguments: "
    assert refused(lambda: template(chat, arguments={"x": 1})) == (
        f"{begin}the chat template does not read 'x'; expected none, since it has no arguments"
    )
    assert refused(lambda: template(chat, arguments={"messages": []})).startswith(
        f"{begin}the chat template sets itself 'messages'; expected none"
    )
    assert refused(lambda: template(chat, arguments={"tools": []})) == (
        f"{begin}tools have settings of their own; expected data.files.chat.tools, a list of them, or the column of "
        "each row's tools as `tools` of a source"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{%- if not date_string is defined %}{%- set date_string = '26 Jul' %}{%- endif %}{{ date_string }}",
        "{% generation %}{{ date_string }}{% endgeneration %}",
        "{%- for m in messages %}{%- if loop.last %}{%- break %}{%- endif %}{%- endfor %}{{ date_string }}",
        "{{ bos_token }}{{ strftime_now('%Y') }}{% set ns = namespace(x=0) %}{% set ns.x = 1 %}{{ date_string }}",
    ],
)
def test_arguments_of_templates_as_published_ones_read_them(bpe: PreTrainedTokenizerBase, source: str) -> None:
    tokenizer = other(bpe, "{{ messages[0].content }}" + source)
    tokenizer.bos_token = "<|endoftext|>"
    date = {"date": "2026-01-31"} if "strftime_now" in source else {}
    assert template(tokenizer, arguments={"date_string": "today"}, **date).prompt([USER], "f:1").endswith("today")
    assert refused(lambda: template(tokenizer, arguments={"date": 1})).endswith("expected one of date_string")


def test_a_template_from_a_file(tmp_path: Path, chat: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ suffix }}", encoding="utf-8")
    made = template(chat, template=path, arguments={"suffix": "\u00e4"})
    assert made.prompt([SYSTEM, USER], "f:1") == "system:Be brief.;user:1+2?;\u00e4"
    path.write_text("one\ntwo {% for %}")
    assert refused(lambda: template(chat, template=path)).startswith(
        "the chat template, line 2: Expected an expression"
    )
    message = f"data.files.chat.template: {tmp_path}/no.jinja: no such file"
    assert refused(lambda: template(chat, template=tmp_path / "no.jinja")) == message
    path.write_bytes(b"\xff")
    assert refused(lambda: template(chat, template=path)).endswith("own.jinja: not a text file in UTF-8")


def test_a_system_prompt_that_the_template_leaves_out_or_refuses(bpe: PreTrainedTokenizerBase) -> None:
    message = "data.files.chat.system is set, and the chat template does not render the content of a system message"
    tokenizer = other(bpe, WITHOUT_SYSTEM)
    assert refused(lambda: template(tokenizer, system="Think.")) == message
    assert template(tokenizer).prompt([USER], "f:1") == "[user]1+2?[assistant]"
    tokenizer = other(bpe, REFUSING)
    assert refused(lambda: template(tokenizer, system="Think.")) == (
        "data.files.chat.system: the chat template refuses these messages: System role not supported"
    )
    assert refused(lambda: template(tokenizer).prompt([USER], "f:1")).startswith("f:1: the chat template refuses these")


def test_a_system_prompt_that_the_tokenizer_cannot_encode(tmp_path: Path) -> None:
    digits = Tokenizer(WordLevel({str(digit): digit for digit in range(10)}))  # and no token for what is unknown
    digits.pre_tokenizer = Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=digits)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert template(tokenizer, system="12").prompt([{"role": "user", "content": "3"}], "f:1") == "123"
    assert refused(lambda: template(tokenizer, system="Think.")).startswith(
        "data.files.chat.system ('Think.') cannot be encoded: "
    )


def test_a_template_that_writes_todays_date(bpe: PreTrainedTokenizerBase) -> None:
    asks = "{% if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }} "
    tokenizer = other(bpe, asks + "{% for message in messages %}{{ message.content }}{% endfor %}")
    assert refused(lambda: template(tokenizer).prompt([USER], "f:1")) == (
        "f:1: the chat template writes today's date, with which prompts differ every day; expected "
        "data.files.chat.date, such as 2026-01-31, for every day"
    )
    assert template(tokenizer, date="2026-01-31").prompt([USER], "f:1") == "31 Jan 2026 1+2?"
    assert template(tokenizer, arguments={"day": "today"}).prompt([USER], "f:1") == "today 1+2?"
    message = "data.files.chat.date is set, and the chat template does not ask for a date; expected none"
    assert refused(lambda: template(bpe, date="2026-01-31")) == message


def test_a_tokenizer_without_a_template(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    tokenizer, end = (
        other(bpe, None),
        "the tokenizer has no chat template; expected data.files.chat.template, the file of one",
    )
    assert template(tokenizer).source is None
    assert refused(lambda: template(tokenizer, system="x")) == f"data.files.chat.system is set and {end}"
    assert refused(lambda: template(tokenizer, arguments={"x": 1})) == f"data.files.chat.arguments is set and {end}"
    assert refused(lambda: template(tokenizer, texts="user")) == f"data.files.chat.texts=user, and {end}"
    assert (
        refused(lambda: template(tokenizer).prompt([USER], "f:1"))
        == f"f:1: the prompt is a list of messages, and {end}"
    )
    (tmp_path / "a.jinja").write_text("{{ messages[0].content }}")
    assert template(tokenizer, template=tmp_path / "a.jinja").prompt([USER], "f:1") == "1+2?"


def test_of_several_templates_the_default(bpe: PreTrainedTokenizerBase) -> None:
    tokenizer = other(bpe, {"default": "{{ messages[0].content }}!", "tool_use": "other"})
    assert template(tokenizer).prompt([USER], "f:1") == "1+2?!"
    assert template(other(bpe, {"tool_use": "other"})).source is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "[], expected a list of messages"),
        ("hello", "'hello', expected a list of messages"),
        ({"role": "user"}, '{"role": "user"}, expected a list of messages'),
        ([USER, "x"], "message 2 is 'x', expected an object with role and content"),
        ([{"content": "x"}], 'message 1 is {"content": "x"}, expected an object with role and content'),
        ([{"role": None, "content": "x"}], 'message 1 is {"role": null, "content": "x"}, expected an object with'),
        (
            [{"role": "human", "content": "x"}],
            "message 1 has role 'human', expected one of system, developer, user, assistant, tool",
        ),
        ([{"role": "user"}], "message 1 has content null, expected a text"),
        ([{"role": "user", "content": None}], "message 1 has content null, expected a text"),
        ([{"role": "user", "content": 3}], "message 1 has content 3, expected a text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "message 1 has a part of type 'image', expected texts alone",
        ),
        (
            [{"role": "user", "content": ["x"]}],
            "message 1 has a text among its parts, expected objects with type and text",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "message 1 has a part of type 'text', expected texts alone",
        ),
        (
            [USER, ANSWER],
            "the last message is the assistant's, expected one that it answers; or data.files.chat.generation",
        ),
    ],
)
def test_messages_that_cannot_be(chat: PreTrainedTokenizerBase, messages: Any, message: str) -> None:
    assert refused(lambda: template(chat).prompt(messages, "f:1")).startswith(f"f:1: {message}")


def test_what_is_null_is_left_out_before_the_template_sees_it(bpe: PreTrainedTokenizerBase) -> None:
    source = "{% for m in messages %}{{ m.content }}{% if 'name' in m %}({{ m.name }}){% endif %}{% endfor %}"
    messages = [USER | {"name": None}, USER | {"name": "Ada"}]
    assert template(other(bpe, source)).prompt(messages, "f:1") == "1+2?1+2?(Ada)"
    calls = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "3"},
    ]
    assert '[{"name": "add"}]' in template(bpe).prompt(calls, "f:1")


def test_texts_of_parts_are_joined(chat: PreTrainedTokenizerBase) -> None:
    content = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?", "image": None}]
    assert template(chat).prompt([{"role": "user", "content": content}], "f:1").startswith("<|user|>1+2?<|end|>")
    assert joined([], "f:1") == ""


def test_special_tokens_of_a_prompt_are_those_of_its_template(bpe: PreTrainedTokenizerBase) -> None:
    text = template(bpe).prompt([USER], "f:1")
    tokens = bpe(text, add_special_tokens=False)["input_ids"]
    assert tokens == bpe.apply_chat_template([USER], add_generation_prompt=True, tokenize=True, return_dict=False)


# Spans to train on


def trained_on(rendered: Rendered) -> list[str]:
    return [rendered.text[begin:end] for begin, end in rendered.trained_on]


def test_what_the_assistant_wrote_is_trained_on_with_the_end_of_its_turn(chat: PreTrainedTokenizerBase) -> None:
    messages = [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "three"}, USER]
    rendered = template(chat).conversation(messages, "f:1")
    assert trained_on(rendered) == ["3<|end|>", "three<|end|>"]
    assert rendered.text.endswith("three<|end|>")  # nothing after it is trained on
    assert trained_on(template(chat, train_on="last").conversation(messages, "f:1")) == ["three<|end|>"]
    assert trained_on(template(chat).conversation(messages, "f:1", train_on="last")) == ["three<|end|>"]


def test_a_template_that_strips_earlier_thinking(bpe: PreTrainedTokenizerBase) -> None:
    assert bpe.chat_template == QWEN_LIKE
    thought = {"role": "assistant", "content": "<think>\none\n</think>\n\n3"}
    message = refused(lambda: template(bpe).conversation([USER, thought, USER, thought], "f:1"))
    assert message.startswith(
        "f:1: the chat template renders the beginning of the conversation differently once message 2 "
    )
    [last] = trained_on(template(bpe, train_on="last").conversation([USER, thought, USER, thought], "f:1"))
    assert last == "<think>\none\n</think>\n\n3<|im_end|>\n"
    assert trained_on(template(bpe).conversation([USER, ANSWER, USER, ANSWER], "f:1")) == ["3<|im_end|>\n"] * 2


def test_a_conversation_without_anything_to_learn(chat: PreTrainedTokenizerBase) -> None:
    message = "f:1: no message of the assistant after another, expected one to train on"
    for messages in ([USER], [ANSWER, USER]):
        assert refused(lambda messages=messages: template(chat).conversation(messages, "f:1")) == message


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["chat", "bpe"])
def test_what_is_trained_on_begins_where_a_prompt_ends(
    request: pytest.FixtureRequest, name: str, generation_prompt: bool
) -> None:
    made = template(request.getfixturevalue(name), generation_prompt=generation_prompt)
    messages = [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "three"}]
    rendered = made.conversation(messages, "f:1")
    before = [rendered.text[:begin] for begin, _ in rendered.trained_on]
    assert before == [made.prompt(messages[:count], "f:1") for count in (2, 4)]
    prompt = template(request.getfixturevalue(name), generation_prompt=False).prompt(messages, "f:1")
    assert before[-1] + trained_on(rendered)[-1] == prompt
