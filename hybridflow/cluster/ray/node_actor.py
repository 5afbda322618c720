"""Actor of one node of a cluster: calls functions there, listens for probes and rates, and reads logs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d import rendezvous
from engine3d.errors import EngineError
from hybridflow.cluster.hosts.checks import facts  # noqa: F401  # called here, when a disk may not answer
from hybridflow.cluster.hosts.network.probe import answer_probes
from hybridflow.cluster.processes import rank_look  # noqa: F401
from hybridflow.cluster.ray.rank_logs import LogReader, NewBytes, make_directory

if TYPE_CHECKING:
    from hybridflow.cluster.hosts.network.rate_probe import Rate


class NodeActor:
    """Actor of one node. It holds no device, and its methods may run at the same time.

    Args:
        address: of the node.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._listening: socket.socket | None = None
        self._logs: LogReader | None = None
        self._reading = threading.Lock()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on this node."""
        return function(*arguments)

    def answer_probes(self, secret: str, source: int) -> int:
        """Answer probes from now on; the port."""
        port = self.listen()
        assert self._listening is not None
        answer_probes(self._listening, secret, source)
        return port

    def listen(self) -> int:
        """Listen at a free port of this node's address in the cluster, and no longer at an earlier one; the port."""
        self.close()
        try:
            self._listening = rendezvous.listen(self._address)
        except OSError as error:
            raise EngineError(f"cannot listen at {self._address}: {error.strerror or error}") from None
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.shutdown(socket.SHUT_RDWR)  # wakes a thread that accepts
            listening.close()

    def rate(self, *plan: Any) -> Rate:
        """Take part in a measurement, as of `rate_probe.measure`; node 0 by the socket of `listen`."""
        from hybridflow.cluster.hosts.network.rate_probe import measure  # here: it imports torch

        listening, self._listening = self._listening, None
        return measure(listening, *plan)

    def open_logs(self, run: Path, processes: Collection[str], in_place: bool, private: bool) -> None:
        """Prepare the run's directory here, before its ranks start, and read their logs from then on."""
        make_directory(run, in_place=in_place, private=private)
        self._logs = LogReader(run, processes, socket.gethostname())

    def read_logs(self, most_behind: int) -> list[NewBytes]:
        """New bytes of the logs."""
        with self._reading:
            return self._logs.read(most_behind) if self._logs is not None else []
