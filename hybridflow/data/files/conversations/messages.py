"""Messages and tools of rows, in any of their layouts, as lists of objects for a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_DIGITS_OF_DATA, JsonError, json_kind, json_text, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}
"""Role by the value of `from` in messages of `from` and `value`."""
_WEIGHTS = ("weight", "train", "training", "loss")
"""Names under which data say if a message is trained on."""
_LIST = re.compile(r"\s*\[\s*\{")
_PYTHON_LIST = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")


def from_text(value: Any, location: str) -> Any:
    """The messages that a text holds as JSON. Any other value, and any other text, is returned unchanged.

    Raises:
        UserError: the text is a list of messages as Python prints it.
    """
    if not isinstance(value, str) or not _LIST.match(value):
        return value
    if _PYTHON_LIST.match(value):
        raise UserError(
            f"{location}: the text {shortened(value, 40)!r} is a list as Python prints it; expected JSON, such as "
            "json.dumps writes it"
        )
    try:
        parsed = parse_json(value, most_digits=MOST_DIGITS_OF_DATA)
    except JsonError:
        return value
    return parsed if is_messages(parsed) else value


def is_messages(value: Any) -> bool:
    """True if a value is a list of objects that are messages of some layout."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, Mapping) and ("role" in message or {"from", "value"} <= message.keys()) for message in value
    )


def ends_with_assistant(value: Any) -> bool:
    """True if a value is a list of messages of which the last is the assistant's."""
    return is_messages(value) and "assistant" in (
        value[-1].get("role"),
        _SHAREGPT_ROLES.get(str(value[-1].get("from"))) if "role" not in value[-1] else None,
    )


def read_messages(messages: Any, location: str) -> list[dict[str, Any]]:
    """Messages with role and content as a template expects them.

    The content is a text, or null where a message of the assistant calls tools. All other keys that are null are left
    out: columns of Parquet have them for every message, and templates ask if they are there. `weight` is 0 or 1 where
    the data say if a message is trained on.

    Raises:
        UserError: the value is no list of messages.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f"{location}: {json_text(messages)}, expected a list of messages")
    return [_message(message, f"{location}: message {number}") for number, message in enumerate(messages, start=1)]


def _message(message: Any, location: str) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" not in message and {"from", "value"} <= message.keys():
        message = _of_sharegpt(message, location)
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise UserError(f"{location} is {json_text(message)}, expected an object with role and content")
    if role not in ROLES:
        raise UserError(f"{location} has role {shortened(role, 40)!r}, expected one of {', '.join(ROLES)}")
    given = {name: value for name, value in message.items() if value is not None}
    if "function_call" in given:
        raise UserError(f"{location} has a function_call, expected tool_calls, a list of such")
    if calls := _calls(given.pop("tool_calls", None), location):
        given["tool_calls"] = calls
    content = given.get("content")
    if isinstance(content, list):
        given["content"] = content = joined(content, location)
    if content is None and calls:
        given["content"] = None
    elif not isinstance(content, str):
        raise UserError(f"{location} has content {json_text(content)}, expected a text")
    for name in [name for name in _WEIGHTS if name in given]:
        if (weight := given.pop(name)) not in (0, 1):
            raise UserError(f"{location} has {name} {json_text(weight, 40)}, expected 0 or 1")
        given["weight"] = min(given.get("weight", 1), int(weight))
    return given


def _of_sharegpt(message: Mapping[str, Any], location: str) -> dict[str, Any]:
    """A message of `from` and `value` as one of role and content."""
    speaker = message["from"]
    if speaker not in _SHAREGPT_ROLES:
        expected = ", ".join(_SHAREGPT_ROLES)
        raise UserError(f"{location} is from {json_text(speaker, 40)}, expected one of {expected}")
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": _SHAREGPT_ROLES[speaker], "content": message["value"], **others}


def _calls(calls: Any, location: str) -> list[dict[str, Any]]:
    calls = _list_of(calls)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{location} has tool_calls {json_text(calls)}, expected a list of objects")
    return [dict(call) for call in calls]


def read_tools(tools: Any, location: str) -> Tools:
    """The tools of a conversation: a list of objects, of texts of JSON, or such a text. Nothing for null.

    Raises:
        UserError: the value is no list of tools.
    """
    parsed = _list_of(tools)
    if isinstance(parsed, list):
        parsed = [from_json(tool) for tool in parsed]
    if not isinstance(parsed, list) or not all(isinstance(tool, Mapping) for tool in parsed):
        raise UserError(f"{location}: tools are {json_text(tools)}, expected a list of objects, or its JSON text")
    return parsed


def from_json(value: Any) -> Any:
    """Value of a text of JSON. Any other value, and any other text, is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, most_digits=MOST_DIGITS_OF_DATA)
    except JsonError:
        return value


def _list_of(value: Any) -> Any:
    """A list that may be a text of JSON; nothing for null and an empty text."""
    return [] if value is None or value == "" else from_json(value)


def joined(content_parts: list[Any], where: str) -> str:
    """Join the parts of a content to a text. Raises UserError for a part that is no text."""
    texts = []
    for content_part in content_parts:
        if not isinstance(content_part, Mapping):
            raise UserError(
                f"{where} has {json_kind(content_part)} among its parts, expected objects with type and text"
            )
        kind = content_part.get("type")
        if kind != "text" or not isinstance(content_part.get("text"), str):
            raise UserError(f"{where} has a part of type {kind!r}, expected texts alone")
        texts.append(content_part["text"])
    return "".join(texts)
