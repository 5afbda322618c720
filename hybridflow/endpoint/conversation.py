"""Conversations of a session: messages and texts to tokens, of which those that were drawn stay as they are."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError, first_difference
from engine3d.rollout.tool_calls import ToolCallReader
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.messages import Message, Tools, read_messages, read_tools
from hybridflow.data.tokenizer import encode_continuation, encode_prompt, encode_text, response_texts, without_end_of
from hybridflow.endpoint.token_tree import Branch, TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOCATION = "messages"
_NAME = re.compile(r"[a-zA-Z]\w{0,49}", re.ASCII)
"""Names of tools that are counted by name."""


@dataclass(frozen=True)
class Position:
    """Tokens that a request asks the policy to continue.

    Args:
        branch: of the tree.
        context: all tokens from the root.
        key: of the messages or text so far.
        tools: that the policy may call.
    """

    branch: Branch
    context: Sequence[int]
    key: str
    tools: Tools = ()


@dataclass(frozen=True)
class Drawn:
    """Answer of the policy.

    Args:
        content: its text without special tokens and tool calls; None if there are only calls.
        tool_calls: as OpenAI's endpoint has them.
        tokens: count of its tokens.
        context_tokens: count of those before it.
        complete: True if it ended by itself, False if it had no tokens left.
        called: names of the tools that it calls, for counts.
    """

    content: str | None
    tool_calls: Sequence[Mapping[str, Any]]
    tokens: int
    context_tokens: int
    complete: bool
    called: Sequence[str] = ()

    @property
    def finish_reason(self) -> str:
        """Reason for the end in OpenAI's words."""
        if self.tool_calls:
            return "tool_calls"
        return "stop" if self.complete else "length"

    @property
    def message(self) -> dict[str, Any]:
        """Message of the assistant."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class SessionTokens:
    """The conversations of a session as one tree of tokens.

    Messages of the assistant that the policy has written are represented by the tokens that were drawn. They are found
    by what comes before them, their text and their calls, where an agent may have rewritten white space and the JSON of
    arguments. All other messages are rendered by the chat template, each once.

    Args:
        tokenizer: of the policy.
        template: of conversations; only text completions without.
        parser: name of SGLang's parser of tool calls; None if tools are refused.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, parser: str | None = None
    ) -> None:
        self._tokenizer, self._template, self._parser = tokenizer, template, parser
        self._calls = 0
        """Calls of tools that were read: templates of some families have ids of nine characters."""
        self.tree = TokenTree()
        self._texts: list[tuple[str, str]] = []
        """Text up to the end of each answer of a text completion, and its key."""
        self.difference: str | None = None
        """First difference between the tokens of a conversation and what the chat template makes of its messages, in
        words; None if there is none."""

    def of_messages(self, messages: Sequence[Message], tools: Tools) -> Position:
        """Position behind messages.

        Raises:
            UserError: these are no messages that the assistant answers, or the template does not render them.
        """
        if self._template is None:
            raise UserError("the tokenizer has no chat template; expected /v1/completions")
        tools = read_tools(list(tools), "tools")
        if tools and self._parser is None:
            raise UserError("tools: SGLang knows no parser for this chat template; expected environment.tool_parser")
        checked = read_messages(list(messages), _LOCATION)
        if checked[-1]["role"] == "assistant":
            raise UserError(f"{_LOCATION}: the last message is the assistant's, expected one that it answers")
        keys = list(_keys(checked, tools))
        for number in range(len(checked) - 1, 0, -1):
            if checked[number - 1]["role"] == "assistant":
                known = self.tree.upto(keys[number])
                if known is not None:
                    text = _after(self._template, checked[number - 1], checked[number:])
                    following = encode_continuation(self._tokenizer, text, _LOCATION)
                    context = [*known, *without_end_of(known, following, self._tokenizer)]
                    self._compare(context, checked, tools)
                    return Position(self.tree.branch(context), context, keys[-1], tools)
        text = self._template.prompt(checked, _LOCATION, tools)
        context = encode_text(self._tokenizer, text, _LOCATION)
        return Position(self.tree.branch(context), context, keys[-1], tools)

    def _compare(self, context: Sequence[int], messages: Sequence[Message], tools: Tools) -> None:
        """Note the first conversation whose text is another than the template makes of its messages."""
        if self.difference is not None:
            return
        assert self._template is not None
        drawn = str(self._tokenizer.decode(list(context), skip_special_tokens=False))
        try:
            rendered = self._template.prompt(list(messages), _LOCATION, tools)
        except UserError as error:
            self.difference = f"is refused by the chat template: {error}"
            return
        if drawn != rendered:
            shown = first_difference(drawn, rendered)
            self.difference = "is {} where the chat template makes {} of its messages".format(*shown)

    def of_text(self, prompt: str | Sequence[int]) -> Position:
        """Position behind a text or tokens. Raises UserError if the text cannot be encoded, or a token is none."""
        if not isinstance(prompt, str):
            count = len(self._tokenizer)
            if (wrong := next((token for token in prompt if not 0 <= token < count), None)) is not None:
                raise UserError(f"prompt: token {wrong}, expected 0 to {count - 1}")
            return Position(self.tree.branch(prompt), prompt, "")
        key = max(((text, key) for text, key in self._texts if prompt.startswith(text)), key=_length, default=None)
        known = self.tree.upto(key[1]) if key is not None else None
        if key is None or known is None:
            context = encode_prompt(self._tokenizer, prompt, "prompt")
        else:
            context = [*known, *encode_continuation(self._tokenizer, prompt[len(key[0]) :], "prompt")]
        return Position(self.tree.branch(context), context, prompt)

    def answer(self, position: Position, tokens: Sequence[int], *, complete: bool, messages: bool) -> Drawn:
        """Add an answer of the policy to the tree.

        Args:
            position: that it continues.
            tokens: that were drawn.
            complete: True if it ended by itself.
            messages: True if it is a message, False if it is a text.
        """
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        drawn = Drawn(text, (), len(tokens), len(position.context), complete)
        if not messages:
            key = uuid.uuid4().hex
            if position.key:
                self._texts.append((position.key + text, key))
            self.tree.grow(position.branch, tokens, key)
            return drawn
        if position.tools:
            drawn = self._with_calls(drawn, tokens, position.tools)
        self.tree.grow(position.branch, tokens, _key(position.key, drawn.message))
        return drawn

    def _with_calls(self, drawn: Drawn, tokens: Sequence[int], tools: Tools) -> Drawn:
        """The answer with the calls of tools that are in its text. One that cannot be read stays text."""
        assert self._parser is not None
        (text,) = response_texts(self._tokenizer, [list(tokens)], keep_special_tokens=True)
        read = ToolCallReader(self._parser, tools, self._tokenizer).read(text)
        if not read.calls:
            return replace(drawn, called=["malformed"] if read.malformed else [])
        first, self._calls = self._calls, self._calls + len(read.calls)
        calls = [
            {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(read.calls, start=first)
        ]
        known = {str(tool.get("function", {}).get("name")) for tool in tools}
        called = [call.name if call.name in known and _NAME.fullmatch(call.name) else "unknown" for call in read.calls]
        return replace(drawn, content=read.content or None, tool_calls=calls, called=called)


def _after(template: ChatTemplate, answer: Message, following: Sequence[Message]) -> str:
    """Render what follows an answer of the policy. Raises UserError for what the template does not render."""
    if not (calls := answer.get("tool_calls")):
        return template.after_turn(following, _LOCATION)
    answers = [message for message in following if message["role"] == "tool"]
    if len(answers) != len(following) or len(answers) != len(calls):
        raise UserError(
            f"{_LOCATION}: {len(calls)} calls of tools are followed by {len(answers)} answers of tools and "
            f"{len(following) - len(answers)} other messages, expected one answer to each call, and no others"
        )
    by_id = {message.get("tool_call_id"): message for message in answers}
    ids = [call.get("id", "") for call in calls]
    ordered = [by_id[name] for name in ids] if by_id.keys() == set(ids) else answers
    names = [str(call["function"]["name"]) for call in calls]
    return template.after_calls(names, [str(message["content"]) for message in ordered], _LOCATION)


def _length(entry: tuple[str, str]) -> int:
    return len(entry[0])


def _keys(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    """Key of no message, of the first, of the first two, and so on."""
    key = _hash(json.dumps(list(map(dict, tools)), sort_keys=True))
    yield key
    for message in messages:
        key = _key(key, message)
        yield key


def _key(before: str, message: Message) -> str:
    """Key of messages and one more."""
    if message["role"] != "assistant":
        return _hash(before + json.dumps(dict(message), sort_keys=True))
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    shown = [[call.get("name"), _canonical(call.get("arguments"))] for call in calls]
    return _hash(before + json.dumps(["assistant", str(message.get("content") or "").strip(), shown]))


def _canonical(arguments: Any) -> Any:
    """Arguments of a call, whatever the white space of their JSON."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
