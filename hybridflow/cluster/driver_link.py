"""Connection of a driver and the supervisor that has started it: JSON lines over an inherited socket.

Nothing listens, and no other process has it. The driver learns its hosts and their Ray, and is told when one of them is
lost; it tells the run's directory and what the run failed of.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.network_settings import as_environment
from hybridflow.rundir.status.hosts_file import NetworkSetting

DESCRIPTOR = "HYBRIDFLOW_SUPERVISOR"
"""Environment variable with the number of the socket."""
_SUPERVISOR_GONE = "the launcher of this run is gone; without it nobody watches the other hosts"


class DriverLink:
    """The driver's end. Threads may share it.

    Args:
        connection: the socket.

    Raises:
        EngineError: the supervisor is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reading = connection.makefile("rb")
        self._state = threading.Lock()
        self._on_lost: Callable[[str], object] | None = None
        self.lost: str | None = None
        """One line, once a host or the supervisor is lost."""
        self.lost_host: str | None = None
        first = self._next()
        if first is None:
            raise EngineError(_SUPERVISOR_GONE)
        self.hosts = [Host(**host) for host in first["hosts"]]
        self.settings = [[NetworkSetting(**setting) for setting in of_host] for of_host in first["settings"]]
        """Variables of the network in force on each host."""
        self.is_first: bool = first["is_first"]
        """True if the command was not run before in this launch."""
        self.gcs_address: str = first["gcs_address"]
        self.ray_directory = Path(first["ray_directory"])
        """Directory of the launch's Ray on this host."""
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    @property
    def head(self) -> Host:
        """The first host, which runs the driver and Ray's head."""
        return self.hosts[0]

    @property
    def environments(self) -> list[dict[str, str]]:
        """Environment of ranks on each host, by which their process groups find the cluster's network."""
        return [as_environment(of_host) for of_host in self.settings]

    def on_lost(self, call: Callable[[str], object] | None) -> None:
        """Call `call` with one line, in another thread, when a host or the supervisor is lost."""
        with self._state:
            self._on_lost, line = call, self.lost
        if call is not None and line is not None:
            call(line)

    def send(self, kind: str, **fields: Any) -> None:
        """Send the supervisor a message."""
        with contextlib.suppress(OSError):  # it is gone, as the thread says
            self._connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def _next(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            line = self._reading.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def _listen(self) -> None:
        while (message := self._next()) is not None:
            self.lost_host = self.lost_host or message["host"]
            self._lose(message["line"])
        self._lose(_SUPERVISOR_GONE)

    def _lose(self, line: str) -> None:
        with self._state:
            if self.lost is not None:
                return
            self.lost, call = line, self._on_lost
        if call is not None:
            call(line)


_link: DriverLink | None = None


def driver_link() -> DriverLink | None:
    """The connection of this process; None if no supervisor has started it."""
    global _link
    number = os.environ.pop(DESCRIPTOR, None)
    if number is not None:
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        _link = DriverLink(connection)
    return _link


def tell_failure(step: str, line: str) -> None:
    """Tell this process's supervisor, if it has one, what the command failed of; lines of bad input."""
    if _link is not None:
        _link.send("failed", step=step, line=line)


def tell_directory(directory: Path) -> None:
    """Tell this process's supervisor, if it has one, where the run's directory is."""
    if _link is not None:
        _link.send("directory", path=str(directory))


def lost_host() -> str | None:
    """The host that this process's launch has lost, if any."""
    return _link.lost_host if _link is not None else None
