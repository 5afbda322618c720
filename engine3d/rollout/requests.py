"""Requests for responses, the responses, and stats of an engine: what a client, a host process and ranks pass on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine3d.rollout.config import SamplingConfig

if TYPE_CHECKING:
    import numpy as np


FinishReason = Literal["stop", "length", "abort"]

GIVEN = -1
"""Version of tokens of a response that no weights drew: an environment has added them."""
BEGINS = -2
"""Version of a given token with which another sequence of a stored sample begins: it follows none of those before."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response, complete or as far as it is.

    Args:
        token_ids: sampled tokens, a sampled stop token and the token that completed a text stop included; between them
            those of an environment.
        logprobs: natural log-probability of each token under the sampling temperature, of the forward pass that drew
            it; 0 of tokens that were not drawn. See `Alterations` for what is drawn from another distribution than
            that.
        versions: version of the weights that drew each token; `GIVEN` of tokens that were not drawn.
        finish_reason: why it ended; None while it is in flight.
        error: why the engine could not make it, in one line. It has finish reason "abort" then. None otherwise.
        routes: (rows, columns) integers in the format of `RouteFormat`: a row for each token of prompt and response but
            the last, of the forward pass that drew the token after it. None of an engine without `RolloutConfig.routes`
            and of a response without tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    routes: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that drew a token; -1 if none was drawn."""
        return min((version for version in self.versions if version >= 0), default=-1)

    def extended(self, tokens: Sequence[int]) -> Response:
        """The response with tokens that were not drawn at its end, and no reason for which it ended."""
        count = len(tokens)
        return Response(
            [*self.token_ids, *tokens], [*self.logprobs, *[0.0] * count], [*self.versions, *[GIVEN] * count]
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A response to make.

    Args:
        sample: id, unique among the requests in flight.
        prompt: token ids.
        sampling: how tokens are drawn.
        group: number of the draw. Requests of a group have their prompt in common.
        index: of the sample in its group. A deterministic engine draws the same tokens again for the same group, index
            and `RolloutConfig.seed`.
        prefix: tokens that the response has already, and continues from.
        turn_start: index of the first token of its turn: none of the text stops begins before it.
    """

    sample: int
    prompt: Sequence[int]
    sampling: SamplingConfig
    group: int = 0
    index: int = 0
    prefix: Response | None = None
    turn_start: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of an engine that serves a stream.

    Args:
        cache_tokens: capacity of its KV cache.
        used_tokens: cached tokens of requests in flight; shared tokens count once.
        queued: requests that wait for cache.
        retracted: requests that were retracted for others to continue. This and the following count since its start.
        batches: forward passes.
        batch_tokens: sum over batches of the cached tokens of requests after each.
        prompt_tokens: tokens that requests were sent with: of prompts, and of responses so far.
        cached_tokens: those of them that were in the cache.
        resent: responses that were sent again because weights changed.
        continued: responses that paused while weights changed, and continued.
    """

    cache_tokens: int
    used_tokens: int = 0
    queued: int = 0
    retracted: int = 0
    batches: int = 0
    batch_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resent: int = 0
    continued: int = 0
