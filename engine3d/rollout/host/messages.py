"""What the client and the engine's host process say to each other, pickled over one Unix socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine3d.engine_figures import EngineFigures

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One response: its sampled tokens, why it ended, and which weights made it.

    `logprobs[i]` is the natural log-probability, under the sampling temperature, of `token_ids[i]`; a stop token that
    was sampled is part of both, and so is the token that completed a text stop. See `Alterations` for what is drawn
    from another distribution than that.

    `weight_version` is the version that was served when the response was finished, and `first_weight_version` the one
    when it was asked for. They differ where the engine was paused in between, or where the request waited for a
    transfer to end: then all of it is of `weight_version`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    first_weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A response of a stream, whole or as far as it is.

    Args:
        token_ids: that were drawn.
        logprobs: of each, as `Generation` has them: of the forward pass that drew it.
        versions: of the weights that drew each.
        finish_reason: why it ended; None where it has not.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A response that is to be made.

    Args:
        sample: names it; unique among those under way.
        prompt: token ids.
        sampling: SGLang's parameters.
        begun: what it has already, from which it goes on.
    """

    sample: int
    prompt: list[int]
    sampling: dict[str, Any]
    begun: Response | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Sent as responses of a stream end.

    Args:
        responses: by sample.
        figures: of the engine.
    """

    responses: dict[int, Response]
    figures: EngineFigures


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """Sent where a response of a stream cannot be made, for a reason of the engine's. `error`: in one line."""

    error: str


@dataclass(frozen=True, slots=True)
class GivenLogprobs:
    """Natural log-probabilities, at temperature 1, of the tokens of a given sequence from its `first` one on.

    `top_tokens[i]` are the most likely tokens in the place of token `first + i`, by falling probability, and
    `top_logprobs[i]` theirs.
    """

    logprobs: list[float]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message to the host: SGLang's engine arguments, and where its temporary files lie."""

    server_arguments: dict[str, Any]
    run_directory: Path
    client_pid: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the started engine accepts: positions in its KV cache, and token ids below `vocab_size`."""

    max_total_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Request:
    """A call of one method of the host; every one is answered by one Reply of the same id, in any order."""

    id: int
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a Request: a result, or one line that says what failed."""

    id: int
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent from time to time while the engine comes further.

    Args:
        done: for each request that generates, by id, how many of its responses have ended.
        figures: of the engine, once it has told them.
    """

    done: dict[int, int]
    figures: EngineFigures | None = None


START_ID = 0  # the id of the Reply that says that the engine is up, with its Limits
