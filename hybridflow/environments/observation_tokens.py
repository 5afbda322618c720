"""Observations as the tokens that follow a policy's turn. Only they are encoded: the turn stays as it was drawn."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.rollout.tool_calls import CallsOfText, ToolCallReader, find_parser
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate, call_of
from hybridflow.data.files.conversations.messages import Message, from_json
from hybridflow.data.tokenizer import encode_continuation, response_texts, without_end_of
from hybridflow.environments.config import EnvironmentConfig, ObservationRole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MOST_CALLS = 16
"""Calls of one turn, with more of which it is malformed."""
_TO_ESCAPE = 'a"b\nc'
"""A text that differs from itself in JSON."""


def observation_template(
    config: EnvironmentConfig, chat: ChatConfig | None, tokenizer: PreTrainedTokenizerBase
) -> ChatTemplate | None:
    """Return the chat template of observations; None if they are no messages.

    Raises:
        UserError: the tokenizer has no chat template, or it does not render a message of that role as it is.
    """
    if config.role is None:
        return None
    template = ChatTemplate(chat or ChatConfig(), tokenizer)
    if template.source is None:
        raise UserError(
            f"environment.role={config.role}, and the tokenizer has no chat template; expected a template, or null"
        )
    template.after_turn([{"role": config.role, "content": "text"}], f"environment.role={config.role}")
    try:
        template.after_turn([{"role": config.role, "content": _TO_ESCAPE}], "a text with quotes")
    except UserError:
        raise UserError(
            f"environment.role={config.role}: the chat template escapes quotes and line feeds in the text of such a "
            "message; expected a template that writes it as it is, another role, or null"
        ) from None
    return template


class ToolMessages:
    """Calls and answers of tools as the chat template has them.

    Args:
        template: of conversations, with the tools.
        tools: their JSON schemas.
        parser: of calls, as of `environment.tools.parser`.
        tokenizer: of the policy.

    Raises:
        UserError: the template does not render tools, calls or answers, or there is no such parser.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]],
        parser: str | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.template = template
        self._names = [str(tool["function"]["name"]) for tool in tools]
        name = find_parser(parser, template.tool_source, tokenizer, "environment.tools.parser")
        self._reader = ToolCallReader(name, tools, tokenizer)
        first = self._names[0]
        template.after_calls([first], ["text"], "environment.tools")
        try:
            template.after_calls([first, first], ["text", "text"], "environment.tools")
            self._most_calls = _MOST_CALLS
        except UserError:  # some families call one tool at a time
            self._most_calls = 1

    def read(self, text: str) -> CallsOfText:
        """Read the calls of a turn. More of them than the template renders are malformed.

        Args:
            text: with special tokens, but for those at its end.
        """
        read = self._reader.read(text)
        return read if len(read.calls) <= self._most_calls else CallsOfText(text, malformed=True)

    def after(self, turn: CallsOfText, answers: Sequence[str], location: str) -> str:
        """Render what follows a turn with calls. Raises UserError if the template refuses it or answers are missing."""
        # Some templates render an answer only after a call.
        names = [self._names[0]] if turn.malformed else [call.name for call in turn.calls]
        if len(names) != len(answers):
            raise UserError(f"{location}: {len(answers)} answers to {len(names)} calls, expected one for each")
        return self.template.after_calls(names, answers, location)

    def calls(self, turn: CallsOfText) -> list[dict[str, Any]]:
        """Return the calls of a turn as its message has them."""
        arguments = [from_json(call.arguments) for call in turn.calls]
        return [
            call_of(number, call.name, given if isinstance(given, Mapping) else {})
            for number, (call, given) in enumerate(zip(turn.calls, arguments, strict=True))
        ]


def tool_messages(
    config: EnvironmentConfig,
    chat: ChatConfig | None,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> ToolMessages | None:
    """Return the messages of tools; None if there are none. Errors as of `ToolMessages`."""
    if config.tools is None:
        return None
    chat = (chat or ChatConfig()).model_copy(update={"tools": tuple(tools)})
    template = ChatTemplate(chat, tokenizer, "environment.tools: data.files.chat")
    return ToolMessages(template, tools, config.tools.parser, tokenizer)


class ObservationTokens:
    """Encodes observations.

    Args:
        tokenizer: of the policy.
        template: of conversations; needed with a role.
        role: of the message that an observation is; its text follows as it is if None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None = None,
        role: ObservationRole | None = None,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.tools: ToolMessages | None = None
        """Messages of tools that the policy calls; None if there are none."""
        self.role = role
        """Role of the message that an observation is; None if it is none."""

    @property
    def template(self) -> ChatTemplate | None:
        """Template of conversations; None if observations are no messages."""
        return self._template if self.tools is None else self.tools.template

    def text_of(self, turn: Sequence[int]) -> str:
        """Decode a turn's tokens, without special tokens."""
        return str(self._tokenizer.decode(list(turn), skip_special_tokens=True))

    @functools.cached_property
    def frame(self) -> tuple[str, str]:
        """Text of a conversation up to a first turn of the policy, and text of the end of a turn's message."""
        assert self.template is not None
        user: Message = {"role": "user", "content": "x"}
        turn: Message = {"role": "assistant", "content": "x"}
        header = self.template.text_of([user], "a conversation", generation_prompt=True)
        complete = self.template.text_of([user, turn], "a conversation", generation_prompt=False)
        return header, complete.rpartition("x")[2]

    def drawn_text_of(self, turn: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        return str(self._tokenizer.decode(list(turn), skip_special_tokens=False))

    def calls_of(self, turn: Sequence[int]) -> CallsOfText:
        """Read the calls of tools in a turn; none without tools."""
        if self.tools is None:
            return CallsOfText("")
        (text,) = response_texts(self._tokenizer, [list(turn)], keep_special_tokens=True)
        return self.tools.read(text)

    def after_calls(self, turn: Sequence[int], calls: CallsOfText, answers: Sequence[str]) -> list[int]:
        """Encode what follows a turn with calls, as `after` does."""
        assert self.tools is not None
        return self._following(turn, self.tools.after(calls, answers, "answers of tools"))

    def is_ambiguous(self, turn: Sequence[int]) -> bool:
        """True if the text of a turn would be encoded as other tokens than those that were drawn."""
        try:
            return encode_continuation(self._tokenizer, self.drawn_text_of(turn), "a turn") != list(turn)
        except UserError:
            return True

    def after(self, turn: Sequence[int], text: str) -> list[int]:
        """Encode what follows a turn whose answer is this text.

        After a message that includes the tokens with which the next turn begins. The end of a message that the policy
        has written itself is not among them. A turn is followed by a message even if that is empty: the policy does
        not write its next one without the header.

        Args:
            turn: its tokens; none before the first turn.
            text: of the observation.

        Raises:
            UserError: the text cannot be encoded, or the template does not render it.
        """
        if not text and (not turn or self.role is None):
            return []
        if self.role is None or self._template is None:
            return encode_continuation(self._tokenizer, text, "an observation")
        following = self._template.after_turn([{"role": self.role, "content": text}], "an observation")
        return self._following(turn, following)

    def _following(self, turn: Sequence[int], text: str) -> list[int]:
        """Encode what follows a turn, without the end of its message if the turn has it."""
        tokens = encode_continuation(self._tokenizer, text, "an observation")
        return without_end_of(turn, tokens, self._tokenizer)
