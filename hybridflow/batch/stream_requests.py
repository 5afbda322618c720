"""A rollout controller's view of engines and samples: ids and lengths; of tokens only prefixes to continue from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError
from engine3d.rollout.requests import Response


class EngineLostError(EngineError):
    """An engine failed in a way after which it can be started again."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A response to make.

    Args:
        sample: its id, unique over the run.
        group: number of the draw.
        index: of the sample in its group.
        prompt: index of the prompt.
        tokens: count of the prompt's, and of the prefix's.
        prefix: of the response, which continues from it.
    """

    sample: int
    group: int
    index: int
    prompt: int
    tokens: int
    prefix: Response | None = None


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The end of a response.

    Args:
        sample, group, index: of its request.
        tokens: count of the response's.
        oldest: version of the oldest weights that drew a token of it.
        complete: True if it ended by itself, False if it was aborted.
    """

    sample: int
    group: int
    index: int
    tokens: int
    oldest: int
    complete: bool


@dataclass(frozen=True, slots=True)
class SampleEnds:
    """Responses that have ended at an engine.

    Args:
        samples: complete ones first, in the order of `rows`.
        rows: the complete samples with their tokens, in the object store of the engine's node.
        figures: of the engine, if it reports them.
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

    async def ended(self) -> SampleEnds:
        """Responses that have ended since the last call; waits until one has, but not for ever: it may be none."""

    async def abort(self, samples: Sequence[int]) -> None:
        """Abort responses; each ends."""

    async def in_flight(self) -> Mapping[int, Response]:
        """The responses in flight that have a token, by sample."""
