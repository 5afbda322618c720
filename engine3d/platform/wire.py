"""Messages between the processes of a transfer, whichever hosts they are on."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from engine3d.errors import EngineError
from engine3d.startup.lazy_imports import dist, torch


class WireError(EngineError):
    """Messages did not arrive. The message names the peers; the wire cannot be used any more.

    Args:
        message: what happened.
        peers: whose messages did not come or go.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class PendingExchange(ABC):
    """Messages in flight. The wire owns the tensors until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all are sent and received; what is enqueued on the device afterwards sees them.

        Raises:
            WireError: a peer is gone, or did not answer in time.
        """


class Wire(ABC):
    """A group of participants, apart from any group that their processes have.

    Args:
        names: how errors call the participants.
        rank: of this one.
        timeout_s: of each wait.
    """

    def __init__(self, names: Sequence[str], rank: int, timeout_s: float) -> None:
        self.names = tuple(names)
        self.rank = rank
        self.timeout_s = timeout_s
        self._failure: str | None = None

    @property
    def size(self) -> int:
        return len(self.names)

    def exchange(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, outgoing_sizes: list[int], incoming_sizes: list[int]
    ) -> PendingExchange:
        """Begin to send to and receive from every participant. All participants call it equally often.

        Args:
            outgoing: bytes, for participant 0, then 1, and so on.
            incoming: where the bytes of participant 0 go, then those of 1, and so on.
            outgoing_sizes, incoming_sizes: bytes for and from each participant; none for this one itself.

        Raises:
            WireError: a peer is gone, or the wire failed before.
        """
        if self._failure is not None:
            raise WireError(f"the connection failed before: {self._failure}")
        return self._exchange(outgoing, incoming, outgoing_sizes, incoming_sizes)

    def close(self) -> None:
        """Close all connections. The others notice it, and exchanges in flight fail."""
        if self._failure is None:
            self._failure = "it was closed"
            self._abort()

    def fail(self, message: str, peers: Sequence[int]) -> WireError:
        """Break the wire and return the error to raise. `peers`: those whose messages are missing."""
        if self._failure is None:
            self._failure = message
            self._abort()
        return WireError(message, peers)

    def late(self, peers: Sequence[int]) -> str:
        return f"{self.called(peers)} did not answer within {self.timeout_s:g} s"

    def called(self, peers: Sequence[int]) -> str:
        return ", ".join(self.names[peer] for peer in peers)

    @abstractmethod
    def _exchange(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, outgoing_sizes: list[int], incoming_sizes: list[int]
    ) -> PendingExchange:
        """Begin an exchange; see `exchange`."""

    @abstractmethod
    def _abort(self) -> None:
        """Break all connections at once."""


def meet(store: dist.Store, names: Sequence[str], rank: int, timeout_s: float) -> dist.Store:
    """Wait until all participants have come, and return the part of the store that is for making connections.

    Raises:
        WireError: with the names of those who have not come in time.
    """
    _gather(store, "here", "come", names, rank, timeout_s)
    return dist.PrefixStore("connections", store)


def all_connected(store: dist.Store, names: Sequence[str], rank: int, timeout_s: float) -> None:
    """Wait until all participants are connected: one that has nothing to send would otherwise close its end while
    another still connects to it.

    Raises:
        WireError: with the names of those who are not connected in time.
    """
    _gather(store, "connected", "connect", names, rank, timeout_s)


def _gather(store: dist.Store, prefix: str, verb: str, names: Sequence[str], rank: int, timeout_s: float) -> None:
    keys = [f"{prefix}/{number}" for number in range(len(names))]
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        if time.monotonic() < deadline:
            raise
        missing = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
        raise WireError(f"{', '.join(missing)} did not {verb} within {timeout_s:g} s") from None
