"""Limits of the requests in flight at each engine, so that its KV cache is used and few requests are retracted.

An engine that runs out of cache returns requests to its queue, and computes their tokens again once there is capacity.
Requests in its queue could be at another engine. An engine with fewer requests than its cache can hold draws fewer
tokens a second than it could. The lengths of responses are not known beforehand, so the limit follows the share of the
cache that is in use:

- As responses end at an engine that has as many requests as it may, and none in its queue, more are sent than ended
  where the share, with their tokens, is below `target`; and fewer where it is above:

      limit += ended * clip((target - share) / SWING, -1, 1)

- While more than `target` is in use nothing is sent, whatever the limit.
- After retractions the limit becomes the requests that were in flight, less those retracted.

It stays between the requests that fit however long they become, with which nothing is ever retracted, and the
most that the engine runs. It moves with the responses that end, and by what was in use before they did: an engine whose
requests are all at their beginning, or end at the same time, has a cache that is nearly empty, and no capacity for
more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine3d.rollout.requests import EngineStats

SWING = 0.2
"""Distance from the target share at which the limit moves by one for each response that ends: up below the target, down
above it.
"""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of an engine's limit.

    Args:
        most: requests that it runs at once.
        sequence_tokens: of the longest prompt with the longest response.
        target: share of its cache that is to be in use; the rest is for requests that grow until others end.
    """

    most: int
    sequence_tokens: int
    target: float = 0.85

    def least(self, cache_tokens: int) -> int:
        """Requests that fit into a cache of `cache_tokens` tokens, however long they become."""
        return max(1, min(self.most, cache_tokens // self.sequence_tokens))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Changes at an engine since its last report.

    Args:
        share: of its cache that was in use before those ended that have.
        in_flight: requests that it had in flight, those that have ended now included.
        ended: requests that have ended.
        retracted: requests that it retracted.
        queued: requests in its queue.
    """

    share: float
    in_flight: int
    ended: int
    retracted: int = 0
    queued: int = 0


def next_limit(limit: float, report: EngineReport, bounds: RequestBounds, least: int) -> float:
    """The limit of an engine after a report; at least `least`."""
    if report.retracted:
        limit = min(limit, report.in_flight) - report.retracted
    elif report.share > bounds.target or (report.in_flight >= int(limit) and not report.queued):
        limit += report.ended * min(1.0, max(-1.0, (bounds.target - report.share) / SWING))
    return min(max(limit, least), bounds.most)


@dataclass
class DynamicBatching:
    """The limits of all engines.

    Args:
        bounds: of every engine.
    """

    bounds: RequestBounds
    _limits: dict[int, float] = field(default_factory=dict)
    _retracted: dict[int, int] = field(default_factory=dict)

    def begin(self, engine: int, stats: EngineStats) -> int:
        """The limit of an engine to which nothing was sent yet."""
        self._limits[engine] = self.bounds.least(stats.cache_tokens)
        self._retracted[engine] = stats.retracted
        return int(self._limits[engine])

    def update(self, engine: int, stats: EngineStats, in_flight: int, ended: int, freed: int) -> int:
        """Update the limit of an engine from its report. Returns the limit.

        Args:
            engine: its number.
            stats: its latest.
            in_flight, ended: as in `EngineReport`.
            freed: tokens of the responses that have ended.
        """
        if engine not in self._limits:
            self.begin(engine, stats)
        before, self._retracted[engine] = self._retracted[engine], stats.retracted
        # A restarted engine counts from 0.
        retracted = stats.retracted - (before if stats.retracted >= before else 0)
        report = EngineReport(
            (stats.used_tokens + freed) / stats.cache_tokens, in_flight, ended, retracted, stats.queued
        )
        least = self.bounds.least(stats.cache_tokens)
        limit = self._limits[engine] = next_limit(self._limits[engine], report, self.bounds, least)
        is_full = stats.used_tokens > self.bounds.target * stats.cache_tokens
        return max(least, min(int(limit), in_flight - ended)) if is_full else int(limit)
