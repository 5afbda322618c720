"""A host process's end of the connection to its client."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine3d.rollout.host.messages import EndedResponses, HostCall, Launch, Progress, Reply
from engine3d.run_files import remove_run_files

_PARENT_POLL_S = 1.0


class ClientConnection:
    """The connection to the client, watched from threads so that its end is seen whatever the main thread does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self.launch: Launch = connection.recv()
        self.deliver: Callable[[HostCall], Any] | None = None
        # A forked child must not keep the connection open: its end is how the client sees that this process died.
        os.register_at_fork(after_in_child=connection.close)
        threading.Thread(target=self._receive, name="client connection", daemon=True).start()
        threading.Thread(target=self._watch_parent, name="client watch", daemon=True).start()

    def send(self, message: Reply | Progress | EndedResponses) -> None:
        with self._send_lock:
            self._connection.send(message)

    def _receive(self) -> None:
        try:
            while True:
                call = self._connection.recv()
                if self.deliver is None:  # the client waits for the first reply before it calls anything
                    raise RuntimeError(f"call of {call.method} came before the engine was up")
                self.deliver(call)
        except (EOFError, OSError):
            self.die()

    def _watch_parent(self) -> None:
        # Not prctl(PR_SET_PDEATHSIG), which fires when the client's *thread* that started us ends. And not the
        # connection alone, which a forked child of the client may hold open.
        while os.getppid() == self.launch.client_pid:
            time.sleep(_PARENT_POLL_S)
        self.die()

    def die(self) -> None:
        """Leave nothing behind: neither files nor any process of this group."""
        sys.stdout.flush()
        sys.stderr.flush()
        remove_run_files(self.launch.run_directory)
        os.killpg(0, signal.SIGKILL)
