"""Actor of one node of a cluster: facts, probes, rates, looks at ranks, stacks and logs there."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d import rendezvous
from engine3d.errors import EngineError
from hybridflow.cluster.hosts.checks import facts
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.probe import Peer, Probe, answer_probes, probe_pairs
from hybridflow.cluster.processes.rank_look import RankLook, RankPlace, look_here, write_stacks_here
from hybridflow.cluster.ray.rank_logs import LogReader, NewBytes, make_directory
from hybridflow.rundir.file_names import FLIGHT_RECORDER

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

    def clock(self) -> float:
        """Seconds since the epoch by the clock of this node."""
        return time.time()

    def collect_facts(self, run_dir: Path, needs: facts.Needs, head: str, mark: Path) -> facts.HostFacts:
        """Facts of this node, as of `facts.collect`."""
        return facts.collect(run_dir, needs, head=head, mark=mark)

    def sees_mark(self, mark: Path) -> bool:
        """True if another node's mark is seen here."""
        return facts.sees_mark(mark)

    def answer_probes(self, secret: str, source: int) -> int:
        """Answer probes from now on; the port."""
        port = self.listen()
        assert self._listening is not None
        answer_probes(self._listening, secret, source)
        return port

    def probe(self, source: Host, peers: Sequence[Peer], secret: str, limit_s: float) -> list[Probe]:
        """Try every other node from here."""
        return probe_pairs(source, peers, secret, limit_s)

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

    def look(self, locations: Sequence[RankPlace]) -> list[RankLook]:
        """Look at ranks of this node."""
        return look_here(locations)

    def write_stacks(self, locations: Sequence[RankPlace], wake: bool) -> None:
        """Ask ranks of this node to write their stacks."""
        write_stacks_here(locations, wake)

    def open_logs(self, run: Path, processes: Collection[str], in_place: bool, private: bool) -> None:
        """Prepare the run's directory here, before its ranks start, and read their logs from then on."""
        make_directory(run, in_place=in_place, private=private)
        self._logs = LogReader(run, processes, socket.gethostname())

    def read_logs(self, most_behind: int) -> list[NewBytes]:
        """New bytes of the logs."""
        with self._reading:
            return self._logs.read(most_behind) if self._logs is not None else []

    def request_recordings(self, run: Path) -> None:
        """Ask ranks of this node for flight recordings of torch, as on the driver's."""
        directory = run / FLIGHT_RECORDER
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
