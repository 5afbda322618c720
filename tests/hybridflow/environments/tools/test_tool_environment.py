"""Episodes with tools in a process: calls, answers as tokens of the tool's role, rewards, and failures by kind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from engine3d.rollout.tool_calls import CallsOfText
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeStart, EpisodeTurn
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens, ToolMessages, tool_messages
from hybridflow.environments.tools.process import _load_tools
from hybridflow.rewards.processes.function_process import RewardError

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[4]
TEMPLATE = ROOT / "launch/recipes/data/tools.jinja"
SOURCE = '''
import os, time

def echo(text: str) -> str:
    """Repeat a text.

    Args:
        text: The text.
    """
    return text

def fail(how: str) -> object:
    """Fail.

    Args:
        how: The way.
    """
    match how:
        case "hang": time.sleep(1000)
        case "die": os._exit(3)
        case "flood": return "a" * 1000
        case "nonsense": return object()
        case "letter": return "\\u00e9"  # which the tokenizer has not
        case "surrogate": return "\\ud800"
        case "raise": raise KeyError("not today")
        case "refuse": raise ValueError("no such way")
    return {"how": how}

def untyped(text):
    """Repeat a text."""

def letters(generated_texts, answers, share):
    return [share * len(text) if text == answer else 0.0 for text, answer in zip(generated_texts, answers)]


def levels(generated_texts, level, hint=None, share=1.0):
    return [share * (number or 0) + (0.25 if hints and hints[0] else 0) for number, hints in zip(level, [hint])]


def of_verl(data_source, solution_str, ground_truth, extra_info=None, share=1.0):
    return share * {"sums": 1.0}[data_source] + extra_info["level"]
'''


def _settings(directory: Path, *functions: str, **changed: Any) -> EnvironmentConfig:
    (directory / "tools_of_test.py").write_text(SOURCE)
    tools = {
        "functions": [f"{directory}/tools_of_test.py:{name}" for name in functions],
        "parser": "pythonic",
        "reward": {"path": f"{directory}/tools_of_test.py:letters", "arguments": {"share": 0.5}},
    }
    limits = {"tool_timeout_s": changed.pop("tool_timeout_s", 1.0), "max_answer_characters": 100}
    given = {"workers": 1, **limits, "tools": tools | changed}
    return EnvironmentConfig.model_validate(given)


class Player:
    """Plays episodes at a host, in texts."""

    def __init__(self, config: EnvironmentConfig, directory: Path) -> None:
        self._tokenizer = make_chat_tokenizer(directory / "tokenizer")
        tokens = ObservationTokens(self._tokenizer)
        self.host = EpisodeHost(config, tokens)
        self.host.start()
        tokens.tools = tool_messages(config, ChatConfig(template=TEMPLATE), self.host.tools, self._tokenizer)
        self._started = 0

    def play(self, *turns: str, answer: Any = "ab", **fields: Any) -> tuple[list[str], EpisodeAnswer]:
        """Play turns of one episode. Returns the texts that followed each, and the last answer."""
        self._started += 1
        self.host.send([EpisodeStart(self._started, Task("x", answer, fields))])
        last = self._next()
        assert last.failure is None and not last.tokens
        texts = []
        for turn in turns:
            self.host.send([EpisodeTurn(self._started, self._tokenizer.encode(turn), complete=True)])
            last = self._next()
            texts.append(str(self._tokenizer.decode(list(last.tokens))))
        return texts, last

    def _next(self) -> EpisodeAnswer:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if answers := self.host.take_answers(1.0):
                return answers[0]
        raise TimeoutError


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    directory = tmp_path_factory.mktemp("tools")
    made = Player(_settings(directory, "echo", "fail"), directory)
    yield made
    made.host.close()


def test_answers_follow_as_messages_of_the_tool_and_the_last_turn_is_scored(player: Player) -> None:
    texts, last = player.play('[echo(text="ab")]<|end|>', "ab<|end|>")
    assert texts == ["<|tool|>ab<|end|><|assistant|>", ""]
    assert (last.reward, last.done, last.failure) == (1.0, True, None)
    texts, last = player.play('[echo(text="a"), echo(text="b")]', "b<|end|>")  # without room for the end of its message
    assert texts == ["<|end|><|tool|>a<|end|><|tool|>b<|end|><|assistant|>", ""]
    assert last.reward == 0.0
    _, last = player.play('[echo(text="a"), echo(text="b")]<|end|>')
    assert last.counts == {"calls_echo": 2.0} and not last.done


@pytest.mark.parametrize("function", ["levels", pytest.param("of_verl", marks=pytest.mark.long)])
def test_a_reward_gets_fields_of_the_data(tmp_path: Path, function: str) -> None:
    reward = {"path": f"{tmp_path}/tools_of_test.py:{function}", "arguments": {"share": 0.5}}
    player = Player(_settings(tmp_path, "echo", reward=reward), tmp_path)
    try:
        _, last = player.play("ab<|end|>", level=2, data_source="sums")
        assert (last.failure, last.reward) == (None, 1.0 if function == "levels" else 2.5)
        _, last = player.play("ab<|end|>", level=2, data_source="sums", hint="x")  # which the other has not
        assert (last.failure, last.reward) == (None, 1.25 if function == "levels" else 2.5)
        _, last = player.play("ab<|end|>", level=None, data_source="sums")
        assert (last.reward, last.failure) == ((0.0, None) if function == "levels" else (0.0, "raised"))
    finally:
        player.host.close()


@pytest.mark.parametrize(
    ("turn", "text", "counts"),
    [
        ("[ohce()]", "error: there is no tool 'ohce', expected one of echo, fail", {"calls_unknown"}),
        ("[echo()]", "error: 'text' is a required property", {"calls_echo", "calls_with_wrong_arguments"}),
        (
            "[echo(text=1)]",
            "error: argument text: 1 is not of type 'string'",
            {"calls_echo", "calls_with_wrong_arguments"},
        ),
        ('[fail(how="refuse")]', "error: ValueError: no such way", {"calls_fail", "calls_refused"}),
        ('[fail(how="well")]', '{"how": "well"}', {"calls_fail"}),
        ('[echo(text="a)]', "error: the call cannot be read", {"calls_malformed"}),
    ],
)  # fmt: skip
def test_the_model_sees_its_errors(player: Player, turn: str, text: str, counts: set[str]) -> None:
    texts, last = player.play(f"{turn}<|end|>")
    assert texts == [f"<|tool|>{text}<|end|><|assistant|>"]
    assert last.failure is None and not last.done and last.counts.keys() == counts


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("hang", "timeout", "gave no answer within 1 s"),
        ("flood", "nonsense", "a text of 1,000 characters, expected at most 100"),
        ("nonsense", "nonsense", "tool fail returned a object, expected a text or what JSON has"),
        ("letter", "nonsense", "no text for the tokenizer"),
        ("surrogate", "nonsense", "lone surrogate, which is not UTF-8"),
        ("raise", "raised", "KeyError"),
        ("die", "died", "ended with exit code 3"),
    ],
)
def test_failures_that_are_not_the_models_fault_drop_their_episode(
    player: Player, how: str, kind: str, reason: str
) -> None:
    _, last = player.play(f'[fail(how="{how}")]<|end|>')
    assert (last.failure, reason in last.reason) == (kind, True), last
    assert player.play('[echo(text="a")]<|end|>')[1].failure is None


@pytest.mark.parametrize(
    ("functions", "changed", "reason"),
    [
        (["untyped"], {}, r"untyped has no schema: .*expected a type hint for each parameter"),
        (["echo"], {"reward": "no_module:score"}, "reward no_module:score cannot be imported"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, functions: list[str], changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"^environment\.tools: .*{reason}") as error:
        Player(_settings(tmp_path, *functions, **changed), tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("functions", "changed", "reason"),
    [
        (["missing"], {}, "has no function 'missing'"),
        (["echo", "echo"], {}, "two are named 'echo'"),
        (["echo"], {"functions": [{"path": "search", "arguments": {"path": "none.jsonl"}}]}, "there is no such file"),
    ],
)
def test_tools_that_cannot_be_loaded_are_named(
    tmp_path: Path, functions: list[str], changed: dict[str, Any], reason: str
) -> None:
    tools = _settings(tmp_path, *functions, **changed).tools
    assert tools is not None
    with pytest.raises(RewardError, match=rf"^tools?\b.*{reason}") as error:
        _load_tools(tools.class_arguments["functions"], str(tmp_path))
    assert "\n" not in str(error.value)


def test_the_python_tool_runs_programs_in_the_sandbox(tmp_path: Path) -> None:
    sandbox = {"isolation": "none", "limits": {"timeout_s": 20}}
    functions = [{"path": "python", "arguments": {"sandbox": sandbox}}]
    config = _settings(tmp_path, functions=functions, tool_timeout_s=60.0).model_copy(
        update={"max_answer_characters": 1000}
    )
    player = Player(config, tmp_path)
    try:
        texts, last = player.play('[python(code="print(6*7)")]<|end|>', '[python(code="1/0")]<|end|>')
        assert last.failure is None, last
        assert texts[0] == "<|tool|>42<|end|><|assistant|>"
        assert "ZeroDivisionError: division by zero\nerror: failed<|end|>" in texts[1]
    finally:
        player.host.close()


QWEN = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{% if loop.last and message.role == "assistant" %}<think></think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
TOOL = {
    "type": "function",
    "function": {"name": "echo", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def test_several_answers_are_rendered_by_the_template(tmp_path: Path) -> None:
    (tmp_path / "qwen.jinja").write_text(QWEN.strip())
    config = _settings(tmp_path, "echo", parser="qwen25")
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    messages = tool_messages(config, ChatConfig(template=tmp_path / "qwen.jinja"), [TOOL], tokenizer)
    assert isinstance(messages, ToolMessages)
    call = '<tool_call>\n{"name": "echo", "arguments": {}}\n</tool_call>'
    read = messages.read(f"{call}\n{call}")
    assert messages.after(read, ["a", "b"], "x") == (
        "<|im_end|>\n<|im_start|>user<tool_response>\na\n</tool_response><tool_response>\nb\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(UserError, match="x: 1 answers to 2 calls"):
        messages.after(read, ["a"], "x")
    assert "error" in messages.after(CallsOfText("", malformed=True), ["error"], "x")


ONE_CALL = """
{{- tools | tojson -}}
{%- for message in messages -%}
<|start|>{{ message.role }}
{% if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
{{ message.tool_calls[0].function | tojson }}
{%- else %}{{ {"output": message.content} | tojson if message.role == "tool" else message.content }}{% endif -%}
<|eot|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant
{% endif -%}
"""


def test_a_template_of_one_call_without_text_gets_no_more(tmp_path: Path) -> None:
    (tmp_path / "one.jinja").write_text(ONE_CALL.strip())
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    messages = tool_messages(
        _settings(tmp_path, "echo"), ChatConfig(template=tmp_path / "one.jinja"), [TOOL], tokenizer
    )
    assert messages is not None
    read = messages.read("Well. [echo()]")
    assert messages.after(read, ['"a"'], "x") == (
        '<|eot|><|start|>tool\n{"output": "\\"a\\""}<|eot|><|start|>assistant\n'
    )
    assert messages.read("[echo(), echo()]").malformed


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", "does not read tools"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}"
            "{{ m.tool_calls | tojson if m.tool_calls }}"
            "{% endfor %}",
            "leaves out the content of message 3, whose role is tool",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "leaves out call 1 of message 2",
        ),
        (
            "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
            "{{ '</call>' if m.tool_calls else '</end>' }}{% endfor %}",
            "ends a message with calls in another way than one without",
        ),
    ],
)
def test_a_template_without_what_tools_need_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    (tmp_path / "template.jinja").write_text(template)
    config = _settings(tmp_path, "echo")
    with pytest.raises(UserError, match=f"^environment.tools.*{reason}"):
        tool_messages(
            config,
            ChatConfig(template=tmp_path / "template.jinja"),
            [TOOL],
            make_chat_tokenizer(tmp_path / "tokenizer"),
        )


def test_exceptions_are_answers_if_asked_for_and_no_thread_of_a_hung_tool_outlives_the_host(tmp_path: Path) -> None:
    player = Player(_settings(tmp_path, "fail", on_exception="answer"), tmp_path)
    process = player.host._processes[0]._process
    assert process is not None
    try:
        texts, last = player.play('[fail(how="raise")]<|end|>')
        assert texts == ["<|tool|>error: KeyError: 'not today'<|end|><|assistant|>"] and last.failure is None
        assert player.play('[fail(how="hang")]<|end|>')[1].failure == "timeout"
    finally:
        player.host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
