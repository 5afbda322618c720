"""Requests for responses, and the responses: the only ones between a client, an engine's host process and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine3d.rollout.config import SamplingConfig

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Response:
    """A response, complete or as far as it is.

    Args:
        token_ids: sampled tokens, a sampled stop token and the token that completed a text stop included.
        logprobs: natural log-probability of each token under the sampling temperature, of the forward pass that drew
            it. See `Alterations` for what is drawn from another distribution than that.
        versions: version of the weights that drew each token.
        finish_reason: why it ended; None while it is in flight.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that drew a token; -1 without tokens."""
        return min(self.versions, default=-1)


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
    """

    sample: int
    prompt: Sequence[int]
    sampling: SamplingConfig
    group: int = 0
    index: int = 0
    prefix: Response | None = None
