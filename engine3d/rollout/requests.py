"""Requests for responses, the responses, and stats of an engine: what a client, a host process and ranks pass on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine3d.errors import UserError
from engine3d.rollout.config import RolloutConfig, SamplingConfig

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
        prompt: token ids. Requests of a group share them.
        sampling: how tokens are drawn.
        group: number of the draw. Requests of a group have their prompt in common.
        index: of the sample in its group. A deterministic engine draws the same tokens again for the same group, index
            and `RolloutConfig.seed`.
        prefix: tokens that the response has already, and continues from.
        turn_start: index of the first token of the turn of an episode: none of the text stops begins before it. None of
            a response that is no turn.
        prompt_index: of the prompt in its data.
        engine: number of the engine that has the prefix in its cache, or is to have it; None if any may.
    """

    sample: int
    prompt: Sequence[int]
    sampling: SamplingConfig
    group: int = 0
    index: int = 0
    prefix: Response | None = None
    turn_start: int | None = None
    prompt_index: int = 0
    engine: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt and of the prefix."""
        return len(self.prompt) + (0 if self.prefix is None else len(self.prefix.token_ids))


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
        verified: chains of drafts that forward passes verified: for each pass, one of each request.
        accepted: drafts that were accepted.
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
    verified: int = 0
    accepted: int = 0


def check_requests(
    requests: Sequence[Request],
    config: RolloutConfig,
    directory: Path,
    vocab_size: int,
    context_length: int,
    *,
    together: bool,
) -> None:
    """Check what an engine is asked for.

    Args:
        requests: of one call.
        config: of the engine.
        directory: of its model.
        vocab_size: of the model.
        context_length: tokens that a prompt and its response may have together.
        together: True if they are submitted together.

    Raises:
        UserError: the engine cannot answer one of them.
    """
    for sampling in {id(request.sampling): request.sampling for request in requests}.values():
        if config.deterministic and sampling.min_p > 0:
            raise UserError(f"min_p is {sampling.min_p}: SGLang cannot sample deterministically with min_p above 0")
        if config.draft_tokens and sampling.altered:
            name, value = next(iter(sampling.altered.items()))
            raise UserError(f"{name}={value} was not tried with draft_tokens={config.draft_tokens}")
        if sampling.stop and not (directory / "tokenizer_config.json").is_file():
            raise UserError(
                f"stop is {list(sampling.stop)}: {directory} has no tokenizer_config.json, and without a "
                "tokenizer responses have no text"
            )
    prompts = {(id(request.prompt), id(request.sampling)): request for request in requests}  # which samples share
    for index, request in enumerate(prompts.values()):
        _check_prompt(f"prompt {index}", request, vocab_size, context_length)
    if together and (continued := [request.sample for request in requests if request.prefix is not None]):
        raise UserError(f"sample {continued[0]} has a prefix, expected none in requests submitted together")


def _check_prompt(name: str, request: Request, vocab_size: int, context_length: int) -> None:
    longest = context_length - request.sampling.max_new_tokens
    if not request.prompt:
        raise UserError(f"{name} is empty")
    if len(request.prompt) > longest:
        raise UserError(
            f"{name} has {len(request.prompt)} tokens; at most {max(longest, 0)} leave room for max_new_tokens "
            f"{request.sampling.max_new_tokens} in a context of {context_length}"
        )
    check_tokens(name, request.prompt, vocab_size)


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for a token id outside the vocabulary. `name`: of the tokens in the error."""
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UserError(f"{name} has token id {wrong}; the vocabulary is 0 to {vocab_size - 1}")
