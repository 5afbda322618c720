"""Observations as the tokens that follow a policy's turn. Only they are encoded: the turn stays as it was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from hybridflow.data.files.chat import ChatTemplate
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tokenizer import encode_text
from hybridflow.environments.config import EnvironmentConfig, ObservationRole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TO_ESCAPE = 'a"b\nc'
"""A text that differs from itself in JSON."""


def observation_template(
    config: EnvironmentConfig, chat: ChatConfig | None, tokenizer: PreTrainedTokenizerBase
) -> ChatTemplate | None:
    """The chat template of observations; None if they are no messages.

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
        self.role = role
        """Role of the message that an observation is; None if it is none."""

    def text_of(self, turn: Sequence[int]) -> str:
        """Text of a turn's tokens, without special tokens."""
        return str(self._tokenizer.decode(list(turn), skip_special_tokens=True))

    def is_ambiguous(self, turn: Sequence[int]) -> bool:
        """True if the text of a turn would be encoded as other tokens than those that were drawn."""
        text = str(self._tokenizer.decode(list(turn), skip_special_tokens=False))
        try:
            return encode_text(self._tokenizer, text, "a turn") != list(turn)
        except UserError:
            return True

    def after(self, turn: Sequence[int], text: str) -> list[int]:
        """Tokens that follow a turn whose answer is this text; of a message also those with which the next turn begins.

        The end of a message that the policy has written itself is not among them. A turn is followed by a message even
        if that is empty: the policy does not write its next one without the header.

        Args:
            turn: its tokens; none before the first turn.
            text: of the observation.

        Raises:
            UserError: the text cannot be encoded, or the template does not render it.
        """
        if not text and (not turn or self.role is None):
            return []
        if self.role is None or self._template is None:
            return encode_text(self._tokenizer, text, "an observation")
        following = self._template.after_turn([{"role": self.role, "content": text}], "an observation")
        tokens = encode_text(self._tokenizer, following, "an observation")
        return tokens[1:] if turn and tokens and turn[-1] == tokens[0] else tokens
