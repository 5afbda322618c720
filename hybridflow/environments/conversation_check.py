"""Comparison of conversations as they were drawn with what the chat template makes of their messages.

Where both differ, a policy that is later prompted with messages reads another text than it was trained on. Nothing is
changed: tokens stay as they were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine3d.errors import UserError, first_difference
from engine3d.rollout.tool_calls import CallsOfText
from hybridflow.data.files.conversations.chat import answer_to
from hybridflow.data.files.conversations.messages import Message
from hybridflow.environments.observation_tokens import ObservationTokens


@dataclass(frozen=True)
class Exchange:
    """A turn of the policy and what followed.

    Args:
        turn: its tokens.
        calls: of tools in it.
        following: tokens after it; none after the last turn.
        answers: texts of observations after it.
    """

    turn: Sequence[int]
    calls: CallsOfText
    following: Sequence[int] = ()
    answers: Sequence[str] = ()


@dataclass
class ConversationCheck:
    """Check of one conversation, turn by turn, each with the exchange before it.

    Args:
        tokens: decodes and renders.
    """

    tokens: ObservationTokens
    _before: list[Exchange] = field(default_factory=list)

    def difference(self, exchange: Exchange) -> str | None:
        """First difference between decoding and template, in words; None if there is none, or no template."""
        template, before, self._before = self.tokens.template, self._before, [exchange]
        if template is None or exchange.calls.malformed or any(entry.calls.malformed for entry in before):
            return None
        user: list[Message] = [{"role": "user", "content": "x"}]
        messages = [*user, *(message for entry in before for message in self._messages(entry, answered=True))]
        messages += self._messages(exchange, answered=False)
        drawn = [token for entry in before for token in (*entry.turn, *entry.following)]
        text = self.tokens.drawn_text_of([*drawn, *exchange.turn])
        try:
            header, end = self.tokens.frame
            rendered = template.text_of(messages, "a conversation", generation_prompt=False)
        except UserError as error:
            return f"is refused by the chat template: {error}"
        same = header + text
        if rendered.startswith(same) and end.endswith(rendered[len(same) :]):
            return None
        return "is {} where the chat template makes {} of its messages".format(*first_difference(same, rendered))

    def _messages(self, exchange: Exchange, *, answered: bool) -> list[Message]:
        tokens, calls = self.tokens, exchange.calls
        assistant: dict[str, Any] = {"role": "assistant", "content": tokens.text_of(exchange.turn)}
        given: list[dict[str, Any]] = []
        if calls.calls and tokens.tools is not None:
            given = tokens.tools.calls(calls)
            assistant |= {"content": calls.content, "tool_calls": given}
        if not answered:
            return [assistant]
        if given:
            return [assistant, *map(answer_to, given, exchange.answers)]
        return [assistant, *({"role": tokens.role, "content": answer} for answer in exchange.answers)]
