"""Responses to other prompts than those of groups: of evaluations, greedy baselines and the Python API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine3d.errors import EngineError
from engine3d.rollout.requests import Request
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.stored_rows import StoredRow
from hybridflow.batch.stream_requests import SampleEnd, StreamEngine
from hybridflow.rollout.stream_engines import StreamEngines, StreamTasks
from hybridflow.rollout.stream_types import OtherRows

type Share = Sequence[tuple[Request, int]]
"""Requests of one engine, each with the index of its prompt."""


@dataclass(slots=True, eq=False)
class _OtherCall:
    """The requests of one call, as they end."""

    in_flight: dict[int, dict[int, tuple[Request, int]]] = field(default_factory=dict)
    """Requests at each engine by sample, each with the index of its prompt."""
    waiting: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that were to be at an engine that is lost."""
    rows: dict[int, StoredRow] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """Reasons why responses could not be made."""
    ends: dict[int, float] = field(default_factory=dict)
    """Time of the last end at each engine."""

    @property
    def has_ended(self) -> bool:
        """True if no response is missing."""
        return not self.waiting and not any(self.in_flight.values())


class OtherRequests:
    """Requests in flight that belong to no group. Those of a lost engine are submitted to others.

    Args:
        calls: of the engines.
        tasks: of the stream.
        clock: in seconds.
    """

    def __init__(self, calls: StreamEngines, tasks: StreamTasks, clock: Callable[[], float]) -> None:
        self._calls, self._tasks, self._clock = calls, tasks, clock
        self._of_sample: dict[int, _OtherCall] = {}

    def __len__(self) -> int:
        return len(self._of_sample)

    def __contains__(self, sample: int) -> bool:
        return sample in self._of_sample

    async def respond(self, shares: Mapping[int, Share]) -> OtherRows:
        """Submit the requests of each engine together, and wait for their responses.

        Raises:
            EngineError: an engine failed, or a response was aborted.
        """
        samples = [request.sample for share in shares.values() for request, _ in share]
        call, began = _OtherCall(), self._clock()
        self._of_sample |= dict.fromkeys(samples, call)
        try:
            self._tasks.raise_failure()
            for engine, share in shares.items():
                self._submit(call, engine, share)
            self.resubmit()
            await self._tasks.wait_for(lambda: call.has_ended)
        finally:
            for sample in samples:
                del self._of_sample[sample]
            await self._tasks.wake()
        if missing := len(samples) - len(call.rows):
            cause = f": {call.errors[0]}" if call.errors else ""
            raise EngineError(f"{missing} of {len(samples)} responses were aborted{cause}")
        busy = tuple((engine, began, end) for engine, end in call.ends.items())
        return OtherRows(tuple(call.rows[sample] for sample in samples), busy)

    def ended(self, engine: int, end: SampleEnd, row: StoredRow) -> None:
        """Add the end of a response."""
        call = self._of_sample[end.sample]
        if call.in_flight.get(engine, {}).pop(end.sample, None) is None:
            return  # it was submitted to another engine since
        call.ends[engine] = self._clock()
        if end.complete:
            call.rows[end.sample] = row
        elif end.error is not None:
            call.errors.append(end.error)

    def remove_engine(self, number: int) -> None:
        """Submit what was in flight at a lost engine to others, or once one is there."""
        for call in self._calls_in_flight():
            call.waiting += call.in_flight.pop(number, {}).values()
        self.resubmit()

    def resubmit(self) -> None:
        """Submit the requests that wait for an engine to those present, if there are any."""
        present = self._calls.present
        for call in self._calls_in_flight():
            if call.waiting and present:
                waiting, call.waiting = call.waiting, []
                for engine, share in zip(present, even_ranges(len(waiting), len(present)), strict=True):
                    self._submit(call, engine, waiting[share.start : share.stop])

    async def abort(self) -> None:
        """Abort all that is in flight."""
        shares = [share for call in self._calls_in_flight() for share in call.in_flight.items()]
        await asyncio.gather(*(self._calls.abort(engine, list(samples)) for engine, samples in shares if samples))

    def _calls_in_flight(self) -> list[_OtherCall]:
        return list(dict.fromkeys(self._of_sample.values()))

    def _submit(self, call: _OtherCall, engine: int, share: Share) -> None:
        if engine not in self._calls.present:
            call.waiting += share
        elif share:
            by_sample = {request.sample: (request, prompt) for request, prompt in share}
            call.in_flight.setdefault(engine, {}).update(by_sample)
            self._calls.submit(engine, partial(_submit_others, share))


async def _submit_others(share: Share, engine: StreamEngine) -> None:
    await engine.submit_others([request for request, _ in share], [prompt for _, prompt in share])
