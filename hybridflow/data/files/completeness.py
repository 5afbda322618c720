"""Forms of messages that chat templates differ in, and a probe whether a template renders all of them.

A template gets the messages once with a marker in place of each content, each call's name and arguments, and each
tool's name. Markers that are not in its text show what it leaves out. Templates may strip, escape and shorten
contents, such as earlier reasoning: a marker has nothing that they could remove.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.data.files.conversations.messages import Message, Tools, from_json

MARKER = "e7d1b04c"
"""A text that no template has by itself."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold what the assistant thought before it wrote the content."""


@dataclass(frozen=True)
class Form:
    """A form of messages.

    Args:
        content: of a message that calls tools and has no text: as the row has it, null, or an empty text.
        arguments: of calls: as an object, which engines make of what clients send, or as its JSON text.
    """

    content: Literal["given", "null", "empty"] = "given"
    arguments: Literal["object", "text"] = "object"

    def applied(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in this form, without their weights."""
        return [self._applied(message) for message in messages]

    def _applied(self, message: Message) -> dict[str, Any]:
        given = {name: value for name, value in message.items() if name != "weight"}
        if self.content != "given" and _is_silent(message):
            given["content"] = None if self.content == "null" else ""
        if "tool_calls" in given:
            given["tool_calls"] = [self._call(call) for call in given["tool_calls"]]
        return given

    def _call(self, call: Message) -> dict[str, Any]:
        arguments = _function(call).get("arguments")
        if _kind(arguments) in ("other", self.arguments):
            return dict(call)
        other = from_json(arguments) if self.arguments == "object" else json.dumps(arguments, ensure_ascii=False)
        return _with_function(call, arguments=other)


def forms_of(messages: Sequence[Message]) -> list[Form]:
    """The forms that messages have, the first choice first."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    has_arguments = any(_kind(_function(call).get("arguments")) != "other" for call in calls)
    arguments: list[Any] = ["object", "text"] if has_arguments else ["object"]
    contents: list[Any] = ["given"]
    if silent := [message["content"] for message in messages if _is_silent(message)]:
        contents += ["empty"] * (None in silent) + ["null"] * (silent != [None] * len(silent))
    return [Form(content, argument) for argument in arguments for content in contents]


def shape_of(messages: Sequence[Message], tools: Tools) -> Hashable:
    """All that a probe depends on: roles, keys, and which contents and arguments there are."""
    return len(tools), *(
        (
            *(message["role"], *sorted(message), _is_text(message["content"]), message["content"] is None),
            *(_kind(_function(call).get("arguments")) for call in message.get("tool_calls", ())),
        )
        for message in messages
    )


@dataclass
class TemplateProbe:
    """Messages and tools with markers in place of their contents.

    Args:
        messages: to mark.
        tools: to mark.
    """

    messages: list[dict[str, Any]]
    tools: Tools
    _marked: dict[str, str] = field(default_factory=dict)
    _arguments: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        last, marked = len(self.messages), []
        for number, message in enumerate(self.messages, start=1):
            marked.append(self._message(message, number, is_last=number == last))
        self.messages = marked
        self.tools = [
            _with_function(tool, name=self._mark(f"tool {name!r}"))
            if isinstance(name := _function(tool).get("name"), str)
            else tool
            for tool in self.tools
        ]

    def _mark(self, what: str) -> str:
        marker = f"{MARKER}x{len(self._marked)}z"
        self._marked[marker] = what
        return marker

    def _message(self, message: dict[str, Any], number: int, *, is_last: bool) -> dict[str, Any]:
        marked, role = dict(message), message["role"]
        if _is_text(message["content"]):
            marked["content"] = self._mark(f"the content of message {number}, whose role is {role}")
        if is_last and role == "assistant":
            for name in _REASONING:
                if _is_text(message.get(name)):
                    marked[name] = self._mark(f"{name} of message {number}")
        if "tool_calls" in message:
            marked["tool_calls"] = [
                self._call(call, f"call {index} of message {number}")
                for index, call in enumerate(message["tool_calls"], start=1)
            ]
        return marked

    def _call(self, call: Message, what: str) -> dict[str, Any]:
        function, changed = _function(call), dict[str, Any]()
        if isinstance(function.get("name"), str):
            changed["name"] = self._mark(what)
        if (kind := _kind(function.get("arguments"))) != "other":
            marker = self._mark(f"the arguments of {what}")
            self._arguments.add(marker)
            changed["arguments"] = {marker: 1} if kind == "object" else json.dumps({marker: 1})
        return _with_function(call, **changed)

    def missing(self, text: str) -> str | None:
        """First content that a rendered text leaves out, or writes in another form than JSON. None if there is none."""
        return next(self._all_missing(text), None)

    def _all_missing(self, text: str) -> Iterator[str]:
        for marker, what in self._marked.items():
            printed_by_python, quoted_twice = f"'{marker}'", f'\\"{marker}'
            is_garbled = marker in self._arguments and (printed_by_python in text or quoted_twice in text)
            if marker not in text or is_garbled:
                yield what


def _is_silent(message: Message) -> bool:
    """True if a message calls tools and has no text."""
    return "tool_calls" in message and not _is_text(message["content"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and not value.isspace()


def _kind(arguments: Any) -> str:
    """Form of arguments: "object", "text" of one, or "other"."""
    if isinstance(arguments, Mapping):
        return "object"
    return "text" if isinstance(arguments, str) and isinstance(from_json(arguments), Mapping) else "other"


def _function(call: Message) -> Message:
    """The function of a call or a tool, which some data have without an object around it."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _with_function(call: Message, **changed: Any) -> dict[str, Any]:
    """A call or a tool with other values in its function."""
    function = {**_function(call), **changed}
    return {**call, "function": function} if isinstance(call.get("function"), Mapping) else function
