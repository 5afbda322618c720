"""Requests of a stream's groups: waiting or in flight, with the tokens that they continue from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine3d.rollout.requests import Response
from hybridflow.batch.stored_rows import StoredRow
from hybridflow.batch.stream_requests import SampleEnd, StreamRequest
from hybridflow.rollout.dispatch import Dispatcher
from hybridflow.rollout.ledger import Group
from hybridflow.rollout.stream.types import GroupRows, GroupState


@dataclass(slots=True)
class GatheredGroup:
    """The samples of a group so far.

    Args:
        group: the draw.
        samples: ids of its samples.
        ends: samples that have ended, by index in the group.
        scores: by index in the group.
    """

    group: Group
    samples: range
    ends: dict[int, tuple[SampleEnd, StoredRow]] = field(default_factory=dict)
    scores: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: GroupRows) -> GatheredGroup:
        """The group that a step had taken."""
        ends = {end.index: (end, row) for end, row in zip(rows.ends, rows.rows, strict=True)}
        first = rows.ends[0].sample
        return cls(rows.group, range(first, first + len(ends)), ends, dict(enumerate(rows.scores)))

    def is_complete(self, *, scored: bool) -> bool:
        """True if all samples have ended. `scored`: and have a score."""
        count = len(self.samples)
        return len(self.ends) == count and (not scored or len(self.scores) == count)

    def rows(self) -> GroupRows:
        """The complete group."""
        ends, rows = zip(*(self.ends[index] for index in range(len(self.samples))), strict=True)
        return GroupRows(self.group, ends, rows, tuple(self.scores[index] for index in sorted(self.scores)))

    def state(self, prefix: Callable[[int], Response | None]) -> GroupState:
        """State over a restart. `prefix`: tokens of a sample that is in flight."""
        ended = tuple(self.ends[index] for index in sorted(self.ends))
        prefixes = {index: prefix(sample) for index, sample in enumerate(self.samples) if index not in self.ends}
        return GroupState(self.group.number, self.samples.start, ended, prefixes, dict(self.scores))


class GroupRequests:
    """Requests of samples that have not ended, and what becomes of those that are aborted.

    Args:
        dispatcher: sends them.
        prompt_tokens: of a prompt, by its index.
        begin: called with the first request of each episode, in place of sending it; None without episodes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prompt_tokens: Callable[[int], int],
        begin: Callable[[StreamRequest], None] | None = None,
    ) -> None:
        self._dispatcher, self._prompt_tokens, self._begin = dispatcher, prompt_tokens, begin
        self._requests: dict[int, StreamRequest] = {}
        self._reclaimed: dict[int, Response | None] = {}
        """Samples that are aborted to continue at another engine, with the tokens that they have."""
        self._dropped: set[int] = set()
        """Samples of dropped groups that are aborted."""

    @property
    def are_aborted(self) -> bool:
        """True if samples of dropped groups have not ended yet."""
        return bool(self._dropped)

    def add(self, gathered: GatheredGroup, prefixes: Mapping[int, Response | None]) -> None:
        """Add the requests of a group. `prefixes`: tokens of its samples, by index in the group."""
        group, tokens = gathered.group, self._prompt_tokens(gathered.group.prompt)
        for index, sample in enumerate(gathered.samples):
            if index not in gathered.ends:
                prefix = prefixes.get(index)
                count = tokens + _tokens_of(prefix)
                request = StreamRequest(sample, group.number, index, group.prompt, count, prefix)
                if self._begin is not None:
                    self._begin(request)
                else:
                    self.submit(request)

    def submit(self, request: StreamRequest, *, first: bool = False) -> None:
        """Add a request, behind those that wait, or before them."""
        self._requests[request.sample] = request
        self._dispatcher.add(request, first=first)

    def ended(self, end: SampleEnd) -> Literal["dropped", "again", "ended"]:
        """Record the end of a request: of a dropped group, aborted and to be sent again, or ended by its engine."""
        self._dispatcher.ended(end.sample)
        request = self._requests.pop(end.sample, None)
        reclaimed = end.sample in self._reclaimed
        prefix = self._reclaimed.pop(end.sample, None)
        if end.sample in self._dropped:
            self._dropped.discard(end.sample)
            return "dropped"
        if reclaimed and not end.complete and request is not None:
            self._send_again(request, prefix)
            return "again"
        return "ended"

    def drop(self, gathered: GatheredGroup) -> dict[int, list[int]]:
        """Remove a group. Returns its samples in flight, by engine, which are to be aborted."""
        for sample in gathered.samples:
            self._requests.pop(sample, None)
        in_flight = self._dispatcher.forget(gathered.group.number)
        for samples in in_flight.values():
            self._dropped.update(samples)
        return in_flight

    def reclaim(self, engine: int, prefixes: Mapping[int, Response]) -> list[int]:
        """Mark the requests in flight at an engine, which are to be aborted and sent again. Returns their samples.

        `prefixes`: tokens of the samples.
        """
        samples = [sample for sample in self._dispatcher.samples(engine) if sample not in self._dropped]
        self._reclaimed |= {sample: prefixes.get(sample) for sample in samples}
        return samples

    def remove_engine(self, engine: int) -> list[int]:
        """Remove a lost engine, and send its requests again. Returns their samples."""
        again = []
        for request in reversed(self._dispatcher.remove_engine(engine)):
            prefix = self._reclaimed.pop(request.sample, None)
            if request.sample in self._dropped:
                self._dropped.discard(request.sample)
                continue
            self._send_again(request, prefix)
            again.append(request.sample)
        return again

    def prefix(self, sample: int, in_flight: Mapping[int, Response]) -> Response | None:
        """Tokens of a response at its engine, or those from which it waits to continue."""
        if sample in in_flight:
            return in_flight[sample]
        request = self._requests.get(sample)
        return request.prefix if request is not None else None

    def _send_again(self, request: StreamRequest, prefix: Response | None) -> None:
        """Send a response again before all that waits, from its prefix or else from that of its request."""
        prefix = prefix or request.prefix
        more = _tokens_of(prefix) - _tokens_of(request.prefix)
        self.submit(replace(request, tokens=request.tokens + more, prefix=prefix), first=True)


def _tokens_of(prefix: Response | None) -> int:
    return 0 if prefix is None else len(prefix.token_ids)
