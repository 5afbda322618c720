"""Messages between the client and the engine's host process, pickled over one Unix socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.engine_stats import EngineStats
from engine3d.rollout.requests import Response


@dataclass(frozen=True, slots=True)
class EndedResponses:
    """Responses that have ended, all of requests that were submitted together in one message.

    Args:
        responses: by sample.
        stats: of the engine.
    """

    responses: dict[int, Response]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class GivenLogprobs:
    """Natural log-probabilities, at temperature 1, of the tokens of a given sequence from its token `first` on.

    `top_tokens[i]` are the most likely tokens at the position of token `first + i`, by falling probability, and
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
    """Limits of the started engine: positions in its KV cache, and token ids below `vocab_size`."""

    max_total_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call of one method of the host; every one is answered by one Reply of the same id, in any order."""

    id: int
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a HostCall: a result, or one line that says what failed."""

    id: int
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent from time to time while the engine comes further.

    Args:
        done: for each call whose responses end together, by id, how many of them have ended.
        stats: of the engine, once it has reported them.
    """

    done: dict[int, int]
    stats: EngineStats | None = None


START_ID = 0  # the id of the Reply that says that the engine is up, with its Limits
