"""Messages between the client and the engine's host process, pickled over one Unix socket, and its end in the host."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine3d.rollout.requests import EngineStats, Response
from engine3d.run_files import remove_run_files


@dataclass(frozen=True, slots=True)
class EndedResponses:
    """Responses that have ended, all of requests that were submitted together in one message.

    Args:
        responses: by sample.
        stats: of the engine.
    """

    responses: dict[int, Response]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class GivenLogprobs:
    """Natural log-probabilities, at temperature 1, of the tokens of a given sequence from its token `first` on.

    `top_tokens[i]` are the most likely tokens at the position of token `first + i`, by falling probability, and
    `top_logprobs[i]` theirs.
    """

    logprobs: list[float]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message to the host: SGLang's engine arguments, and where its temporary files lie."""

    server_arguments: dict[str, Any]
    run_directory: Path
    client_pid: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the started engine: positions in its KV cache, and token ids below `vocab_size`."""

    max_total_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call of one method of the host; every one is answered by one Reply of the same id, in any order."""

    id: int
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a HostCall: a result, or one line that says what failed."""

    id: int
    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent from time to time while the engine comes further.

    Args:
        done: for each call whose responses end together, by id, how many of them have ended.
        stats: of the engine, once it has reported them.
    """

    done: dict[int, int]
    stats: EngineStats | None = None


START_ID = 0  # the id of the Reply that says that the engine is up, with its Limits


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
                if self.deliver is None:  # before the first reply the client calls nothing but `shutdown`
                    break
                self.deliver(call)
        except (EOFError, OSError):
            pass
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
