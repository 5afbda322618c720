"""Limits on the length of prompts, and the cut of longer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.messages import Tools, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIES = 8
"""Largest number of cuts. A text that is cut at a token may have other tokens together with what follows it."""


@dataclass(frozen=True)
class Fit:
    """Lengths of prompts, in tokens.

    Args:
        shortest: those with fewer are dropped.
        longest: those with more are dropped; None without such a limit.
        most: that leave room for the response.
        policy: for those with more.
    """

    shortest: int
    longest: int | None
    most: int
    policy: OverlongPolicy

    def key_values(self) -> list[Any]:
        """All limits, for a key of the cache."""
        return list(astuple(self))

    @property
    def overlong_reason(self) -> str:
        """Reason for dropping a prompt that leaves no room for the response."""
        return f"more than {self.most:,} tokens (data.overlong_prompts=drop)"

    def reason_to_drop(self, tokens: int) -> str | None:
        """Reason for dropping a prompt of `tokens` tokens. None if it is kept."""
        if tokens < self.shortest and self.shortest > 1:
            return f"fewer than {self.shortest:,} tokens (min_prompt_tokens)"
        if self.longest is not None and tokens > self.longest:
            return f"more than {self.longest:,} tokens (max_prompt_tokens)"
        return self.overlong_reason if tokens > self.most and self.policy == "drop" else None


def cut_messages(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tokens: list[int],
    fit: Fit,
    location: str,
    tools: Tools | None = None,
) -> list[int]:
    """Token ids of messages whose longest message of the user is cut, so that the template stays complete.

    Raises:
        UserError: the rest leaves no room.
    """
    messages = read_messages(messages, location)
    texts = {
        number: message["content"] for number, message in enumerate(messages) if message["role"] in ("user", "tool")
    }
    number = max(texts, key=lambda index: len(texts[index]), default=None)
    if number is None or not (content := texts[number]):
        raise UserError(f"{location}: no message of the user that could be cut; expected data.overlong_prompts=drop")
    spans = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    left = len(spans)
    for _ in range(_TRIES):
        left -= len(tokens) - fit.most
        if left < 1:
            break
        cut = [dict(message) for message in messages]
        cut[number]["content"] = _shortened(content, spans, left, fit.policy)
        tokens = list(tokenizer(template.prompt(cut, location, tools), add_special_tokens=False)["input_ids"])
        if len(tokens) <= fit.most:
            return tokens
    raise UserError(
        f"{location}: without its longest message of the user the prompt leaves no room in {fit.most:,} tokens; "
        "expected data.overlong_prompts=drop"
    )


def _shortened(text: str, spans: Sequence[tuple[int, int]], tokens: int, policy: OverlongPolicy) -> str:
    """Cut a text to `tokens` tokens."""
    if policy == "cut_left":
        return text[spans[-tokens][0] :]
    if policy == "cut_right":
        return text[: spans[tokens - 1][1]]
    last = tokens // 2
    return text[: spans[tokens - last - 1][1]] + (text[spans[-last][0] :] if last else "")
