"""A user's reward function in a process of its own, which can be killed when the function hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from hybridflow.rewards import child
from hybridflow.rewards.config import RewardFunctionConfig

_KILL_TIMEOUT_S = 10.0


class RewardProcess:
    """Runs one reward function: `load` or `submit` starts its process, `collect` waits for what was submitted.

    A function that cannot be loaded, raises, hangs or returns something else than one finite number a sample is a
    UserError of one line, which names the reward. After an error no process is left; the next call starts a new one.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline: int | None = None
        self._loaded = False
        self._deadline = self._limit_s = 0.0
        self._samples = 0

    def start(self) -> None:
        """Start the process and the loading of the function, without waiting for it. Nothing if it runs already."""
        if self._connection is not None:
            return
        self._connection, connection = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        with connection, os.fdopen(lifeline):
            self._process = subprocess.Popen(
                [sys.executable, child.__file__, str(connection.fileno()), str(lifeline), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints must not mix with the output of the run
                pass_fds=[connection.fileno(), lifeline],
                start_new_session=True,
            )
        self._loaded = False
        here = str(Path.cwd())
        self._send(
            {
                "path": self._config.path,
                "load_timeout_s": self._config.load_timeout_s,
                "sys_path": [here, *(entry for entry in sys.path if entry not in ("", here))],
            },
            self._config.load_timeout_s,
        )

    def load(self) -> None:
        """Wait until the function is loaded, starting its process if need be."""
        self.start()
        if not self._loaded:
            self._receive("finish its import")
            self._loaded = True

    def submit(self, texts: Sequence[str], prompts: Sequence[str], answers: Sequence[str]) -> None:
        """Start one call. The time limit runs from here."""
        self.load()
        self._samples = len(texts)
        timeout_s = self._config.timeout_s
        columns = {"texts": list(texts), "prompts": list(prompts), "answers": list(answers)}
        self._send(columns | {"timeout_s": timeout_s}, timeout_s)

    def collect(self) -> list[float]:
        """The values of the submitted call, one a sample."""
        return self._receive(f"return the rewards of {self._samples} samples")["values"]

    def close(self) -> None:
        """Kill the process and whatever it started. May be called twice; a later call starts a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._process is not None:
            self._process.wait(timeout=_KILL_TIMEOUT_S)
            self._process = None

    def _send(self, message: dict[str, Any], timeout_s: float) -> None:
        assert self._connection is not None
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = timeout_s
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(child.encode_message(message))
        except TimeoutError:
            raise self._failure(f"did not take its input within {timeout_s:g} s and was killed") from None
        except OSError:
            raise self._failure(self._death()) from None

    def _receive(self, task: str) -> dict[str, Any]:
        assert self._connection is not None
        try:
            reply = child.read_message(self._connection, self._deadline)
        except TimeoutError:
            raise self._failure(f"did not {task} within {self._limit_s:g} s and was killed") from None
        except OSError:
            reply = None
        if reply is None:
            raise self._failure(self._death())
        if "error" in reply:
            raise self._failure(reply["error"])
        return reply

    def _death(self) -> str:
        assert self._process is not None
        process = self._process
        self.close()
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how} instead of returning"

    def _failure(self, what: str) -> UserError:
        self.close()
        return UserError(f"reward {self._config.name!r} ({self._config.path}) {what}")
