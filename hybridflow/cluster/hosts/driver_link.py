"""The two ends of what connects a supervisor and the driver that it has started: JSON lines over an inherited socket.

Nothing listens, and no other process has it. The driver asks for what is done on other hosts, and is told when one of
them is lost; its end by the supervisor's death is told as well.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.description import Cluster

DESCRIPTOR = "HYBRIDFLOW_SUPERVISOR"
"""Environment variable with the number of the socket."""
_SUPERVISOR_S = 2.0
_SUPERVISOR_GONE = "the launcher of this run is gone; without it nobody watches the other hosts"


class DriverLink:
    """The driver's end. Threads may share it.

    Args:
        connection: the socket.
        lost: is called with one line, in another thread, when a host or the supervisor is lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reading = connection.makefile("rb")
        self._answers: queue.Queue[Message] = queue.Queue()
        self._asking = threading.Lock()
        self._numbers = itertools.count()
        self._lost_line: str | None = None
        self.lost_host: str | None = None
        """That is lost."""
        self._lost: Callable[[str], object] | None = None
        self._state = threading.Lock()
        first = self._next()
        if first is None:
            raise EngineError(_SUPERVISOR_GONE)
        self.cluster = Cluster.from_json(first["hosts"])
        self.ray_token: str = first["ray_token"]
        self.environments: list[dict[str, str]] = first["environments"]
        """Of the ranks on each host: how their process groups find the cluster's network."""
        self.apart = frozenset(first["apart"])
        """Hosts that do not see what host 0 has at `run_dir`."""
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    @property
    def lost(self) -> str | None:
        """One line, once a host or the supervisor is lost."""
        return self._lost_line

    def on_lost(self, call: Callable[[str], object] | None) -> None:
        """Have `call` called with one line, in another thread, when a host or the supervisor is lost."""
        with self._state:
            self._lost = call
            line = self._lost_line
        if call is not None and line is not None:
            call(line)

    def ask(self, kind: str, limit_s: float, **fields: Any) -> list[Message]:
        """Ask the agents of all other hosts, through the supervisor; their answers, in order.

        Raises:
            EngineError: one of them cannot do it, or does not answer in time.
        """
        answers = self.ask_each(kind, limit_s, **fields)
        for answer in answers:
            if (error := answer.get("error")) is not None:
                raise EngineError(str(error))
        return answers

    def ask_each(self, kind: str, limit_s: float, **fields: Any) -> list[Message]:
        """As `ask`, with `{"error": one line}` in place of the answer of an agent that has none.

        Raises:
            EngineError: the supervisor does not answer.
        """
        with self._asking:
            number = next(self._numbers)
            self._send(kind, limit_s=limit_s, question=number, **fields)
            deadline = time.monotonic() + limit_s + _SUPERVISOR_S
            while True:
                try:
                    answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise EngineError(f"the hosts' agents did not answer within {limit_s:g} s ({kind})") from None
                if answer.get("question") in (number, None):  # an answer that came too late is another's
                    break
        if (error := answer.get("error")) is not None:
            raise EngineError(str(error))
        answers: list[Message] = answer["answers"]
        return answers

    def tell_directory(self, directory: Path) -> None:
        """Say where the run's directory is, for a card of what the driver itself dies of."""
        self._send("directory", path=str(directory))

    def tell_failure(self, step: str, line: str) -> None:
        """Say what the command failed of, before it ends."""
        self._send("failed", step=step, line=line)

    def _send(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, as the thread says
            self._connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def _next(self) -> Message | None:
        with contextlib.suppress(OSError, ValueError):
            line = self._reading.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def _listen(self) -> None:
        while (message := self._next()) is not None:
            if message["kind"] == "answer":
                self._answers.put(message)
            elif message["kind"] == "lost":
                self.lost_host = self.lost_host or message["host"]
                self._tell(message["line"])
        self._tell(_SUPERVISOR_GONE)
        self._answers.put({"error": _SUPERVISOR_GONE})

    def _tell(self, line: str) -> None:
        with self._state:
            if self._lost_line is not None:
                return
            self._lost_line, call = line, self._lost
        if call is not None:
            call(line)


_link: DriverLink | None = None


def known_link() -> DriverLink | None:
    """This process's, where `driver_link` has found one."""
    return _link


def tell_failure(step: str, line: str) -> None:
    """Say it to this process's supervisor, if it has one."""
    if _link is not None:
        _link.tell_failure(step, line)


def tell_directory(directory: Path) -> None:
    """Say it to this process's supervisor, if it has one."""
    if _link is not None:
        _link.tell_directory(directory)


def lost_host() -> str | None:
    """The host that this process's launch has lost, if any."""
    return _link.lost_host if _link is not None else None


def driver_link() -> DriverLink | None:
    """This process's; None if no supervisor has started it."""
    global _link
    number = os.environ.pop(DESCRIPTOR, None)
    if number is not None:
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        _link = DriverLink(connection)
    return _link
