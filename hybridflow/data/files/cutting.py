"""Which prompts are too long or too short, and what is cut of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.chat import ChatTemplate
from hybridflow.data.files.messages import Tools, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIES = 8
"""Texts that are cut at tokens may have other tokens beside what follows them."""


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

    def facts(self) -> list[Any]:
        """All of it, for a key."""
        return list(astuple(self))

    @property
    def overlong_reason(self) -> str:
        """Why a prompt is dropped that leaves no room."""
        return f"more than {self.most:,} tokens (data.overlong_prompts=drop)"

    def reason_to_drop(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens is none of the data; None if it is."""
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
    place: str,
    tools: Tools | None = None,
) -> list[int]:
    """The token ids of messages of which the longest of the user is cut, so that the template stays whole.

    Raises:
        UserError: the rest leaves no room.
    """
    messages = read_messages(messages, place)
    texts = {
        number: message["content"] for number, message in enumerate(messages) if message["role"] in ("user", "tool")
    }
    number = max(texts, key=lambda each: len(texts[each]), default=None)
    if number is None or not (content := texts[number]):
        raise UserError(f"{place}: no message of the user that could be cut; expected data.overlong_prompts=drop")
    spans = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    left = len(spans)
    for _ in range(_TRIES):
        left -= len(tokens) - fit.most
        if left < 1:
            break
        cut = [dict(each) for each in messages]
        cut[number]["content"] = _shortened(content, spans, left, fit.policy)
        tokens = list(tokenizer(template.prompt(cut, place, tools), add_special_tokens=False)["input_ids"])
        if len(tokens) <= fit.most:
            return tokens
    raise UserError(
        f"{place}: without its longest message of the user the prompt leaves no room in {fit.most:,} tokens; expected "
        "data.overlong_prompts=drop"
    )


def _shortened(text: str, spans: Sequence[tuple[int, int]], tokens: int, policy: OverlongPolicy) -> str:
    """A text of which so many tokens are left."""
    if policy == "cut_left":
        return text[spans[-tokens][0] :]
    if policy == "cut_right":
        return text[: spans[tokens - 1][1]]
    last = tokens // 2
    return text[: spans[tokens - last - 1][1]] + (text[spans[-last][0] :] if last else "")
