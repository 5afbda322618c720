"""How many requests an engine may have in flight, so that its KV cache is used and few requests are retracted.

An engine that runs out of cache takes requests back to its queue, and computes what they had again once there is room;
what waits in its queue could be at another engine. One with fewer requests than its cache has room for draws fewer
tokens a second than it could. How long responses will be is not known beforehand, so the limit follows the share of the
cache that is in use:

- As responses end at an engine that has as many requests as it may, and none in its queue, more are sent than ended
  where the share, with what these have held, is below `target`; and fewer where it is above:

      limit += ended * clip((target - share) / SWING, -1, 1)

- While more than `target` is in use nothing is sent, whatever the limit.
- Requests that were retracted had no room: the limit becomes what was in flight less as many.

It stays between the requests that have room however long they become, with which nothing is ever retracted, and the
most that the engine runs. It moves with the responses that end, and by what was in use before they did: an engine whose
requests are all at their beginning, or end at the same time, has a cache that is nearly empty, and no room for more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine3d.engine_figures import EngineFigures

SWING = 0.2
"""So much below it, two requests are sent for one that has ended; so much above, the limit falls by one for each."""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Between which the limit of an engine stays.

    Args:
        most: requests that it runs at once.
        sequence_tokens: of the longest prompt with the longest response.
        target: share of its cache that is to be in use; the rest is for requests that grow until others end.
    """

    most: int
    sequence_tokens: int
    target: float = 0.85

    def least(self, cache_tokens: int) -> int:
        """Requests that a cache of so many tokens has room for, however long they become."""
        return max(1, min(self.most, cache_tokens // self.sequence_tokens))


@dataclass(frozen=True, slots=True)
class Report:
    """What happened at an engine since it told last.

    Args:
        share: of its cache that was in use before those ended that have.
        flying: requests that it had in flight, those that have ended now included.
        ended: requests that have ended.
        retracted: requests that it took back.
        queued: requests that wait there for room.
    """

    share: float
    flying: int
    ended: int
    retracted: int = 0
    queued: int = 0


def next_limit(limit: float, report: Report, bounds: RequestBounds, least: int) -> float:
    """The limit of an engine after a report; at least `least`."""
    if report.retracted:
        limit = min(limit, report.flying) - report.retracted
    elif report.share > bounds.target or (report.flying >= int(limit) and not report.queued):
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

    def begin(self, engine: int, figures: EngineFigures) -> int:
        """The limit of an engine to which nothing was sent yet."""
        self._limits[engine] = self.bounds.least(figures.cache_tokens)
        self._retracted[engine] = figures.retracted
        return int(self._limits[engine])

    def told(self, engine: int, figures: EngineFigures, flying: int, ended: int, freed: int) -> int:
        """How many requests an engine may have in flight from here on.

        Args:
            engine: its number.
            figures: that it has told.
            flying, ended: as in `Report`.
            freed: tokens of the responses that have ended.
        """
        if engine not in self._limits:
            self.begin(engine, figures)
        before, self._retracted[engine] = self._retracted[engine], figures.retracted
        retracted = figures.retracted - (before if figures.retracted >= before else 0)  # it may be another process
        report = Report((figures.used_tokens + freed) / figures.cache_tokens, flying, ended, retracted, figures.queued)
        least = self.bounds.least(figures.cache_tokens)
        limit = self._limits[engine] = next_limit(self._limits[engine], report, self.bounds, least)
        is_full = figures.used_tokens > self.bounds.target * figures.cache_tokens
        return max(least, min(int(limit), flying - ended)) if is_full else int(limit)
