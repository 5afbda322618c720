"""Decisions of a stream between two steps, in order, as lines of a run's `events.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hybridflow.rollout.ledger import Group, Taken

_MOST = 100_000
"""Lines that are held for a step; what comes after them is counted alone."""


class StreamEvents:
    """Writes down what is decided, and forgets it as it is collected. Decisions of a kind in a row share a line."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._left_out = 0

    def admitted(self, group: Group, first_sample: int) -> None:
        """A group is to be made: its draw, prompt, attempt, and the id of its first sample."""
        self._add("admitted", groups=[[group.number, group.prompt, group.attempt, first_sample]])

    def sent(self, engine: int, version: int, samples: Sequence[int]) -> None:
        """An engine that serves this version gets the requests of some samples."""
        self._add("sent", {"version": version}, samples=samples, engines=[engine] * len(samples))

    def serves(self, engine: int, version: int) -> None:
        """An engine serves this version from here on, where others may serve the one before."""
        self._add("serves", {"version": version}, engines=[engine])

    def lost(self, engine: int, cause: str, samples: Sequence[int]) -> None:
        """An engine is gone. `samples`: those that it had, which continue on other engines with their tokens so far."""
        self._add("lost_engine", {"engine": engine, "cause": cause}, samples=samples)

    def leased(self, engines: Sequence[int]) -> None:
        """Record that these engines take requests on devices leased from the trainer, which waits."""
        self._add("leased", engines=engines)

    def reclaimed(self, engine: int, samples: Sequence[int]) -> None:
        """Record responses aborted at an engine whose devices are reclaimed. They continue later with their tokens."""
        self._add("reclaimed", samples=samples, engines=[engine] * len(samples))

    def aborted(self, engine: int, samples: Sequence[int]) -> None:
        """Record requests of samples that are aborted at an engine."""
        self._add("aborted", samples=samples, engines=[engine] * len(samples))

    def returned(self, why: str, groups: Iterable[Group]) -> None:
        """Groups went back, of which nothing is learned: their draws. `why`: evicted, dropped or lost."""
        if numbers := [group.number for group in groups]:
            self._add(why, groups=numbers)

    def took(self, version: int, taken: Taken) -> None:
        """A step from `version` has its groups."""
        groups = [group.number for group in taken.groups]
        self._add("took", {"version": version, "carried": taken.carried}, groups=groups, staleness=taken.staleness)

    def collect(self) -> tuple[dict[str, Any], ...]:
        """All since the last call."""
        lines, self._lines = self._lines, []
        if self._left_out:
            lines.append({"event": "left_out", "events": self._left_out})
            self._left_out = 0
        return tuple(lines)

    def _add(self, event: str, fields: dict[str, Any] | None = None, **lists: Sequence[Any]) -> None:
        head = {"event": event, **(fields or {})}
        last = self._lines[-1] if self._lines else {}
        if all(last.get(name) == value for name, value in head.items()):
            for name, values in lists.items():
                last[name].extend(values)
        elif len(self._lines) < _MOST:
            self._lines.append(head | {name: list(values) for name, values in lists.items()})
        else:
            self._left_out += 1
