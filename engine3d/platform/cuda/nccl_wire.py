"""Messages through NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, ErrorType
from torch.distributed import ProcessGroupNCCL, Store, Work

from engine3d.environment import exchange_variables
from engine3d.errors import first_line
from engine3d.platform.wire import PendingExchange, Wire, WireError, all_connected, meet

_POLL_S = 50e-6
_NEVER = timedelta(days=365)
"""The limits are kept here: torch's own would end the process."""


class NcclWire(Wire):
    """See `Wire`. The current device is the one whose memory is sent and received.

    Raises:
        WireError: not all participants came or connected in time.
    """

    def __init__(self, store: Store, names: Sequence[str], rank: int, timeout_s: float) -> None:
        super().__init__(names, rank, timeout_s)
        device = torch.device("cuda", torch.cuda.current_device())
        connections = meet(store, names, rank, timeout_s)
        options = ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        # torch's watchdog would end the process when a peer is gone. It reads this when a group is made.
        before = exchange_variables({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
        try:
            # torch's stubs leave out what a backend can do.
            self._group: Any = ProcessGroupNCCL(connections, rank, len(names), options)
        finally:
            exchange_variables(before)
        self._set_up(device)
        all_connected(store, names, rank, timeout_s)
        self._stream = torch.cuda.Stream(device)

    def _set_up(self, device: torch.device) -> None:
        """Set up the communicator. NCCL has no limit for it: a participant may go after all have met."""
        raised: list[RuntimeError] = []

        def connect() -> None:
            torch.cuda.set_device(device)
            try:
                self._group.eager_connect_single_device(device)
            except RuntimeError as error:
                raised.append(error)

        # Left behind when it is late, since nothing ends it.
        thread = threading.Thread(target=connect, name="nccl set-up", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        others = [peer for peer in range(self.size) if peer != self.rank]
        if thread.is_alive():
            raise WireError(f"NCCL was not set up with {self.called(others)} within {self.timeout_s:g} s")
        if raised:
            raise WireError(f"NCCL was not set up with {self.called(others)}: {first_line(raised[0])}")

    def _exchange(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, outgoing_sizes: list[int], incoming_sizes: list[int]
    ) -> PendingExchange:
        sent, received = outgoing[: sum(outgoing_sizes)], incoming[: sum(incoming_sizes)]
        peers = [peer for peer, sizes in enumerate(zip(outgoing_sizes, incoming_sizes, strict=True)) if any(sizes)]
        try:
            work = self._group.alltoall_base(received, sent, incoming_sizes, outgoing_sizes, AllToAllOptions())
        except RuntimeError as error:
            raise self.fail(f"NCCL: {first_line(error)}", peers) from error
        return _NcclExchange(self, work, peers, self._stream)

    def error(self) -> str | None:
        """Asynchronous error of NCCL, such as a broken connection to another host."""
        kind = self._group.get_error()
        return None if kind == ErrorType.SUCCESS else str(kind)

    def _abort(self) -> None:
        self._group.abort()


class _NcclExchange(PendingExchange):
    def __init__(self, wire: NcclWire, work: Work, peers: list[int], stream: torch.cuda.Stream) -> None:
        self._wire = wire
        self._work = work
        self._peers = peers
        # An event of our own: a work of NCCL that failed calls itself completed.
        self._done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            work.wait()
            self._done.record()

    def wait(self) -> None:
        deadline = time.monotonic() + self._wire.timeout_s
        while not self._done.query():
            if time.monotonic() > deadline:
                raise self._wire.fail(self._wire.late(self._peers), self._peers)
            error = self._wire.error()
            if error is not None:
                message = f"one of {self._wire.called(self._peers)} is gone (NCCL: {error})"
                raise self._wire.fail(message, self._peers)
            time.sleep(_POLL_S)
        self._work.wait()
