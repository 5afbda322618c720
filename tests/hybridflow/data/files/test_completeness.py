"""Forms of messages and tools that templates of several kinds need, and messages that templates leave out."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate

TEXT_AFTER_NULL = """
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor -%}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}{{ '<C>' + call['function']['name'] + '\n' + call['function']['arguments'] }}
{%- endfor %}{{ '<E>' }}
{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{{- '<A>' + m['content'].split('</think>')[-1] + '<E>' }}{% endif %}
{%- if m['role'] == 'tool' %}{{ '<T>' + m['content'] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"""
"""Calls are those of null contents, and their arguments are texts."""

TAGGED_JSON = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role in ('user', 'system') %}{{ '<' + m.role + '>' + content }}
{%- elif m.role == 'assistant' %}
{%- if '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<A>' + content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}
{{- '<call>{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}</call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<T>' + content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"""
"""Arguments are texts or objects, earlier thinking is left out, and tools are described."""

OBJECTS = """
{%- if messages[0].role == 'system' %}{{ '<S>' + messages[0].content | trim }}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '<A>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}' }}
{%- elif m.role == 'tool' %}{{ '<T>' + m.content | tojson }}
{%- else %}{{ '<' + m.role + '>' + m.content | trim }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"""
"""One call, whose arguments are an object, in place of the content."""

BEFORE_THE_LAST = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[TOOLS]' + tools | tojson }}{% endif %}
{{- '[INST]' + (system + '\n\n' if loop.last and system is defined else '') + m.content }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}
{{- '[CALLS]' }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content | trim }}
{%- elif m.role == 'tool' %}{{ '[RESULT]' + m.content }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}
{%- endfor %}"""
"""System prompt and tools stand before the last message of the user."""

LOOKS_INTO = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if 'content' in m and '<final>' in m.content %}{{ raise_exception('final in content') }}{% endif %}
{%- if m.tool_calls %}{{ '<A to=' + m.tool_calls[0].function.name + '>' + m.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ '<A>' + m.content }}{% endif %}
{%- else %}{{ '<' + m.role + '>' + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"""
"""Looks for a text in every content, which fails for null."""

TAGGED_ARGUMENTS = """
{%- for m in messages %}{{ '<' + m.role + '>' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<' + call.function.name + '>' }}
{%- if call.function.arguments is not mapping %}<raw>{{ call.function.arguments }}
{%- else %}{% for name, value in call.function.arguments | items %}{{ '<' + name + '>' }}{{ value }}{% endfor %}
{%- endif %}{% endfor %}
{%- endfor %}"""
PRINTING = """
{%- for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}{% endfor %}"""
"""Writes "None" for null, and arguments as Python prints them."""
INTO_THE_FIRST = """
{%- set first = '' %}{% if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\n' %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{{ '<' + m.role + '>' + (first if loop.first else '') + m.content | trim | e }}{% endfor %}"""
WITHOUT_CALLS = "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}{% endfor %}"

USER, SYSTEM = {"role": "user", "content": " Weather in A? "}, {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "A\u00e4", "days": 2}


def made(bpe: PreTrainedTokenizerBase, source: Any, **settings: Any) -> ChatTemplate:
    tokenizer = copy.deepcopy(bpe)
    tokenizer.chat_template = source
    return ChatTemplate(ChatConfig.model_validate(settings), tokenizer)


def refused(template: ChatTemplate, messages: Any, **tools: Any) -> str:
    with pytest.raises(UserError) as error:
        template.prompt(messages, "f:1", **tools)
    return str(error.value)


def called(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assistant = {"role": "assistant", "tool_calls": [call], **message}
    return [USER, assistant, {"role": "tool", "content": "rain", "tool_call_id": "c1"}]


@pytest.mark.slow
@pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TEXT_AFTER_NULL, "<C>weather\n{}<E><T>rain<A>"),
        (TAGGED_JSON, '<A><call>{{"name": "weather", "arguments": {}}}</call><T>rain<A>'),
        (OBJECTS, '<A>{{"name": "weather", "parameters": {}}}<T>"rain"<A>'),
        (BEFORE_THE_LAST, '[CALLS]{{"name": "weather", "arguments": {}}}[RESULT]rain'),
        (LOOKS_INTO, "<A to=weather>{}<tool>rain<A>"),
        (TAGGED_ARGUMENTS, "<assistant><weather><city>A\u00e4<days>2<tool>rain"),
        (PRINTING, "<assistant>weather({})<tool>rain"),
    ],
)
def test_a_call_is_rendered_as_each_template_means_it(
    bpe: PreTrainedTokenizerBase, source: str, expected: str, is_text: bool, message: dict[str, Any]
) -> None:
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    messages = called(arguments if is_text else ARGUMENTS, **message)
    before = copy.deepcopy(messages)
    assert made(bpe, source).prompt(messages, "f:1").endswith(expected.format(arguments))
    assert messages == before


def test_a_call_that_a_template_leaves_out_is_refused(bpe: PreTrainedTokenizerBase) -> None:
    message = "f:1: the chat template leaves out call 1 of message 2; expected a template that renders it, or rows "
    assert refused(made(bpe, WITHOUT_CALLS), called(ARGUMENTS, content=None)).startswith(message)
    assert refused(made(bpe, OBJECTS), called(ARGUMENTS, content="Looking.")).startswith(
        "f:1: the chat template leaves out the content of message 2, whose role is assistant"
    )
    two = called(ARGUMENTS, content=None)
    two[1]["tool_calls"] *= 2
    assert refused(made(bpe, OBJECTS), two) == "f:1: the chat template refuses these messages: one call at a time"


def test_arguments_that_are_no_object_stay(bpe: PreTrainedTokenizerBase) -> None:
    assert "weather\nnone at all<E>" in made(bpe, TEXT_AFTER_NULL).prompt(called("none at all", content=None), "f:1")


@pytest.mark.parametrize(
    ("source", "messages", "left_out"),
    [
        (OBJECTS.replace("'<S>' + messages[0].content | trim", "'<S>'"), [SYSTEM, USER], "1, whose role is system"),
        (TEXT_AFTER_NULL, [{**SYSTEM, "role": "developer"}, USER], "1, whose role is developer"),
        (INTO_THE_FIRST.replace("(first if loop.first else '')", "''"), [SYSTEM, USER], "1, whose role is system"),
        (
            "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}",
            [SYSTEM, USER, {"role": "system", "content": "b"}, USER],
            "3, whose role is system",
        ),
        (
            "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
            [USER, {"role": "tool", "content": "1"}],
            "2, whose role is tool",
        ),
        ("{{ messages[-1].content }}", [USER, {"role": "assistant", "content": "e"}, USER], "1, whose role is user"),
    ],
)
def test_a_message_that_a_template_leaves_out_is_refused(
    bpe: PreTrainedTokenizerBase, source: str, messages: list[dict[str, Any]], left_out: str
) -> None:
    assert refused(made(bpe, source), messages).startswith(
        f"f:1: the chat template leaves out the content of message {left_out}; expected a template that renders it"
    )


@pytest.mark.parametrize("source", [TEXT_AFTER_NULL, TAGGED_JSON, OBJECTS, BEFORE_THE_LAST, INTO_THE_FIRST])
def test_contents_that_templates_strip_move_escape_and_shorten_are_there(
    bpe: PreTrainedTokenizerBase, source: str
) -> None:
    thought = {"role": "assistant", "content": "<think>\nHm & so.\n</think>\n\n It <rains>. "}
    empty = [USER, {"role": "assistant", "content": ""}, USER]
    for messages in ([SYSTEM, USER], [SYSTEM, USER, thought, USER], [USER, thought, USER, thought, USER], empty):
        assert made(bpe, source).prompt(messages, "f:1")


def test_reasoning_of_the_message_that_is_trained_on_is_rendered_or_refused(bpe: PreTrainedTokenizerBase) -> None:
    end = "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    reads = "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ m.reasoning_content }}{% endif %}" + end
    thought = {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."}
    assert "It rains.Hm." in made(bpe, reads).conversation([USER, thought], "f:1").text
    leaves_out = "{% for m in messages %}{{ m.content }}" + end
    assert made(bpe, leaves_out).prompt([USER, thought, USER], "f:1")
    with pytest.raises(UserError, match="f:1: the chat template leaves out reasoning_content of message 2"):
        made(bpe, leaves_out).conversation([USER, thought], "f:1")


# Tools


def test_tools_are_rendered_and_those_of_a_row_replace_those_of_the_recipe(bpe: PreTrainedTokenizerBase) -> None:
    other = {"type": "function", "function": {"name": "clock"}}
    for source in (TAGGED_JSON, BEFORE_THE_LAST):
        template = made(bpe, source, tools=[TOOL])
        assert json.dumps(TOOL) in template.prompt([USER], "f:1")
        assert '"clock"' in (row := template.prompt([USER], "f:1", tools=[other])) and '"weather"' not in row
        assert "weather" not in template.prompt([USER], "f:1", tools=[])


def test_tools_that_a_template_does_not_read_are_refused(bpe: PreTrainedTokenizerBase) -> None:
    with pytest.raises(
        UserError, match=r"chat\.tools is set, and the chat template does not read tools; expected none"
    ):
        made(bpe, OBJECTS, tools=[TOOL])
    sometimes = "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}" + WITHOUT_CALLS
    template = made(bpe, sometimes, tools=[TOOL])
    assert template.prompt([SYSTEM, USER], "f:1")
    assert refused(template, [USER]).startswith("f:1: the chat template leaves out tool 'weather'; expected")


def test_of_several_templates_the_one_of_tools_renders_tools(bpe: PreTrainedTokenizerBase) -> None:
    template = made(bpe, {"default": WITHOUT_CALLS, "tool_use": TAGGED_JSON})
    assert template.prompt([USER], "f:1") == "<user> Weather in A? "
    assert template.prompt([USER], "f:1", tools=[TOOL]).startswith("<tools>")
