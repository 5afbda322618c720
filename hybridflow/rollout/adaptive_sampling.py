"""Sampling by the length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, model_validator

from engine3d.errors import UserError
from engine3d.rollout.config import NEUTRAL, SamplingConfig
from engine3d.settings import MOST_TOKENS, Settings

_ONE_TEMPERATURE = "log-probs, ratio and KL of a batch are of one temperature; expected rollout.sampling.temperature"
_ONE_DISTRIBUTION = (
    "its tokens would be of another distribution than the policy's, whose log-probs are learned from; expected none of "
    "it, or evaluation.NAME.sampling"
)


class PromptSampling(Settings):
    """Sampling settings for prompts up to a length; those of `rollout.sampling` where null."""

    prompt_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The longest of these prompts, in tokens; prompts of any length if null."""
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Most tokens of a response."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Tokens at which a response ends, besides the model's own."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Texts at which a response ends."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token, up to max_new_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _is_of_one_distribution(cls, data: Any) -> Any:
        refused = {"temperature": _ONE_TEMPERATURE, **dict.fromkeys(NEUTRAL, _ONE_DISTRIBUTION)}
        for name in data if isinstance(data, Mapping) else ():
            if name in refused:
                raise ValueError(f"{name} by the length of the prompt: {refused[name]}")
        return data


@dataclass(frozen=True)
class SamplingTable:
    """Sampling settings of a step by the length of the prompt.

    Args:
        rows: most tokens of a prompt, rising, and how responses to such prompts are drawn; None at most in the last.
        rest: for longer prompts.
    """

    rows: tuple[tuple[int | None, SamplingConfig], ...]
    rest: SamplingConfig

    @classmethod
    def of(cls, rows: Sequence[PromptSampling], rest: SamplingConfig) -> SamplingTable:
        """The table that rows of a recipe mean, where `rest` holds for all that they leave out.

        Raises:
            ValueError: rows are in no order.
        """
        bounds = [row.prompt_tokens for row in rows]
        for before, after in pairwise(bounds):
            if before is None or (after is not None and after <= before):
                raise ValueError(
                    f"adaptive_sampling has prompt_tokens={_shown(before)} before {_shown(after)}, expected rising "
                    "numbers, and null in the last row alone"
                )
        made = [
            (row.prompt_tokens, rest.model_copy(update=row.model_dump(exclude={"prompt_tokens"}, exclude_none=True)))
            for row in rows
        ]
        return cls(tuple(made), rest)

    def for_prompt(self, tokens: int) -> SamplingConfig:
        """Return the sampling settings of a prompt of this many tokens."""
        for bound, sampling in self.rows:
            if bound is None or tokens <= bound:
                return sampling
        return self.rest

    @property
    def used(self) -> tuple[SamplingConfig, ...]:
        """All that a prompt may have."""
        last = self.rows[-1][0] if self.rows else 0
        return tuple(sampling for _, sampling in self.rows) + ((self.rest,) if last is not None else ())

    @property
    def longest_response(self) -> int:
        """Most tokens of any response."""
        return max(sampling.max_new_tokens for sampling in self.used)

    @property
    def shortest_limit(self) -> int:
        """The smallest of the limits of responses."""
        return min(sampling.max_new_tokens for sampling in self.used)

    def sequence_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens of a prompt and its longest response."""
        return prompt_tokens + self.for_prompt(prompt_tokens).max_new_tokens

    def prompt_limit(self, context: int) -> int:
        """Return the longest prompt up to which each prompt and its response fit into a context of this many tokens.

        Raises:
            UserError: a row matches no prompt, as its response, or an earlier row's, leaves no tokens for one.
        """
        before = 0
        for bound, sampling in (*self.rows, (None, self.rest)):
            response, prompt_tokens = sampling.max_new_tokens, context - sampling.max_new_tokens
            if prompt_tokens <= before:
                of = f"of prompts of more than {before} tokens " if before else ""
                raise UserError(
                    f"rollout.adaptive_sampling: max_new_tokens={response} {of}leaves no room for a prompt in a "
                    f"context of {context} tokens"
                )
            if bound is None:
                return prompt_tokens
            if prompt_tokens < bound:
                raise UserError(
                    f"rollout.adaptive_sampling: max_new_tokens={response} of prompts of up to {bound} tokens leaves "
                    f"room for {prompt_tokens} of them in a context of {context} tokens; expected "
                    f"prompt_tokens={prompt_tokens}, or a smaller max_new_tokens"
                )
            before = bound
        raise AssertionError("the last row is of all prompts")

    def greedy(self) -> SamplingTable:
        """The same, but that the most likely token is taken."""
        most_likely = {"temperature": 0.0}
        rows = tuple((bound, sampling.model_copy(update=most_likely)) for bound, sampling in self.rows)
        return replace(self, rows=rows, rest=self.rest.model_copy(update=most_likely))


def _shown(bound: int | None) -> str:
    return "null" if bound is None else str(bound)
