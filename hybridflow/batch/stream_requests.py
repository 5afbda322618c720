"""What a rollout controller and engines say to each other: requests, and what became of them. No tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError


class EngineLostError(EngineError):
    """An engine failed in a way after which it can be started again."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a response under way has.

    Args:
        oldest: version of the oldest weights that drew a token of it.
        tokens: how many it has.
        content: as the engine's worker reads it.
    """

    oldest: int
    tokens: int
    content: Any


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A response to make.

    Args:
        sample: its id, unique over the run.
        group: number of the draw.
        place: of the sample in its group.
        prompt: index of the prompt.
        tokens: of the prompt, and of what the response has already.
        begun: what the response has from before a restart.
    """

    sample: int
    group: int
    place: int
    prompt: int
    tokens: int
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """A response that has ended, without its tokens.

    Args:
        sample, group, place: as it was asked for.
        tokens: of the response.
        oldest: version of the oldest weights that drew a token of it.
        whole: whether it ended by itself; it was given up otherwise.
    """

    sample: int
    group: int
    place: int
    tokens: int
    oldest: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """What has ended at an engine.

    Args:
        samples: in the order of the rows of `rows`.
        rows: where the samples with their tokens lie, for whoever learns from them.
        figures: of the engine, if it tells them.
    """

    samples: Sequence[SampleEnd]
    rows: Any = None
    figures: EngineFigures | None = None


class StreamEngine(Protocol):
    """An engine as the controller sees it.

    Each call raises what the engine failed of: EngineLostError where it can be started again.
    """

    async def submit(self, requests: Sequence[StreamRequest]) -> None:
        """Begin responses."""

    async def ended(self) -> Ended:
        """What has ended since the last call; waits until something has, but not for ever: it may be nothing."""

    async def abort(self, samples: Sequence[int]) -> None:
        """Give responses up; each ends."""

    async def under_way(self) -> Mapping[int, Begun]:
        """What the responses under way that have a token have, by sample."""
