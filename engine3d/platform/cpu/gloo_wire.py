"""Messages through gloo."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any

from engine3d.errors import first_line
from engine3d.platform.wire import PendingExchange, Wire, WireError, all_connected, meet
from engine3d.startup.lazy_imports import dist, torch

_CLOSED_HERE = "Application timeout"
_TIMED_OUT = "Timed out"
_NOBODY = (1 << 31) - 1
"""A tag that no message has."""


class GlooWire(Wire):
    """See `Wire`.

    Raises:
        WireError: not all participants came or connected in time.
    """

    def __init__(self, store: dist.Store, names: Sequence[str], rank: int, timeout_s: float) -> None:
        super().__init__(names, rank, timeout_s)
        limit = timedelta(seconds=timeout_s)
        connections = meet(store, names, rank, timeout_s)
        try:
            # torch's stubs leave out what a backend can do.
            self._group: Any = dist.ProcessGroupGloo(connections, rank, len(names), limit)
        except RuntimeError as error:
            others = self.called([peer for peer in range(self.size) if peer != rank])
            raise WireError(f"gloo was not set up with {others}: {_cause(error)}") from error
        all_connected(store, names, rank, timeout_s)
        self._waiting = ThreadPoolExecutor(max_workers=2 * len(names), thread_name_prefix="transfer")
        self._exchanges = 0

    def _exchange(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, outgoing_sizes: list[int], incoming_sizes: list[int]
    ) -> PendingExchange:
        works: list[tuple[int, dist.Work]] = []
        self._exchanges += 1
        for tensor, sizes, begin in (
            (incoming, incoming_sizes, self._group.recv),
            (outgoing, outgoing_sizes, self._group.send),
        ):
            for peer, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
                if size:
                    try:
                        works.append((peer, begin([tensor[end - size : end]], peer, self._exchanges)))
                    except RuntimeError as error:
                        raise self.fail(f"{self.names[peer]} is gone ({_cause(error)})", [peer]) from error
        return _GlooExchange(self, self._waiting, works)

    def _abort(self) -> None:
        # gloo closes every connection of a group when one of its messages is late, and has no other way to do it.
        with suppress(RuntimeError):
            peer = (self.rank + 1) % self.size
            if peer != self.rank:
                self._group.recv([torch.empty(1)], peer, _NOBODY).wait(timedelta(milliseconds=1))
        self._waiting.shutdown(wait=False)


class _GlooExchange(PendingExchange):
    def __init__(self, wire: GlooWire, waiting: ThreadPoolExecutor, works: list[tuple[int, dist.Work]]) -> None:
        self._wire = wire
        self._waiting = waiting
        self._works = works

    def wait(self) -> None:
        # A thread for each message, because one that waits for a slow peer would not hear that another is gone.
        limit = timedelta(seconds=self._wire.timeout_s)
        futures = {self._waiting.submit(work.wait, limit): peer for peer, work in self._works}
        done, unfinished = wait_for(futures, return_when=FIRST_EXCEPTION)
        errors = {future: error for future in done if (error := future.exception()) is not None}
        if not errors:
            return
        raise self._failed(futures, errors, unfinished) from next(iter(errors.values()))

    def _failed(
        self, futures: dict[Future[bool], int], errors: dict[Future[bool], BaseException], unfinished: set[Future[bool]]
    ) -> WireError:
        gone = {
            futures[future]: _cause(error)
            for future, error in errors.items()
            if not str(error).startswith(_CLOSED_HERE) and _TIMED_OUT not in str(error)
        }
        if gone:
            peers = sorted(gone)
            return self._wire.fail(f"{self._wire.called(peers)} is gone ({next(iter(gone.values()))})", peers)
        late = sorted({futures[future] for future in (*errors, *unfinished)})
        return self._wire.fail(self._wire.late(late), late)


def _cause(error: BaseException) -> str:
    """Gloo's message, without the location in its source."""
    return first_line(error).rpartition("] ")[2]
