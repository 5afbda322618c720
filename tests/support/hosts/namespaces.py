"""One set of namespaces held by a PID 1 of its own, and processes started in it as children of this process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.support.hosts.init import Specification

START_S = 120.0
END_S = 120.0
Output = int | IO[str] | IO[bytes] | None


class HostsUnavailable(RuntimeError):
    """This machine makes no hosts; the message says why."""


class Namespaces:
    """Network, mount, PID, UTS and IPC namespaces. They end when PID 1 or this process does.

    Starting takes two calls, so that several start at once: construct all, then `wait_until_up` for each.
    """

    def __init__(self, specification: Specification) -> None:
        self.name = specification["name"]
        self._holder = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py")), json.dumps(specification)],
            stdin=subprocess.PIPE,  # its end is the end of PID 1
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._pidfd = -1
        self._starter: ThreadPoolExecutor | None = None
        self._started: list[subprocess.Popen[str]] = []

    def wait_until_up(self) -> None:
        """Wait for PID 1 to be ready.

        Raises:
            HostsUnavailable: this machine does not let it.
            RuntimeError: something else failed.
            TimeoutError: it took longer than `START_S`.
        """
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], START_S)
        if not ready:
            raise TimeoutError(f"{self.name} is not up after {START_S:.0f} s")
        answer = json.loads(self._holder.stdout.readline() or '{"error": "PID 1 ended"}')
        if "unavailable" in answer:
            raise HostsUnavailable(answer["unavailable"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.pid: int = answer["pid"]
        self._pidfd = os.pidfd_open(self.pid)
        # Children of this thread, and of no other, are in the PID namespace: they stay children of this process.
        self._starter = ThreadPoolExecutor(1, initializer=os.setns, initargs=(self._pidfd, os.CLONE_NEWPID))

    @property
    def is_up(self) -> bool:
        return self._holder.poll() is None

    def path(self, path: str | Path) -> Path:
        """Path of a file of the namespaces for this process."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        stdin: Output = subprocess.DEVNULL,
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[str]:
        """Start a process in a session of its own.

        Args:
            command: program and arguments, as seen from inside.
            env: its whole environment; this process's without TMPDIR if None.
            cwd: working directory, as seen from inside.
            stdin: as for `subprocess.Popen`; so are `stdout` and `stderr`.

        Raises:
            RuntimeError: it is not up.
        """
        if self._starter is None or not self.is_up:
            raise RuntimeError(f"{self.name} is not up: no {command[0]} can start there")

        def enter() -> None:
            os.setns(self._pidfd, os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWIPC | os.CLONE_NEWNET)
            os.chdir(cwd)

        inherited = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        process = self._starter.submit(
            lambda: subprocess.Popen(
                [str(word) for word in command],
                env=dict(inherited if env is None else env),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
                preexec_fn=enter,
            )
        ).result()
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout_s: float = 120.0,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end.

        Raises:
            TimeoutError: it did not end; its process group is killed.
            RuntimeError: with `check`, it failed; with what it printed.
        """
        words = " ".join(map(str, command))
        # Files and no pipes: what the process leaves running may hold its output open.
        with tempfile.TemporaryFile("w+") as out_file, tempfile.TemporaryFile("w+") as err_file:
            process = self.start(command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=out_file, stderr=err_file)
            try:
                process.communicate(input, timeout=timeout_s)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)
                if isinstance(error, subprocess.TimeoutExpired):
                    printed = (_text(out_file) + _text(err_file))[-2000:]
                    message = f"{self.name}: {words!r} did not end within {timeout_s} s; it printed: {printed}"
                    raise TimeoutError(message) from None
                raise
            out, err = _text(out_file), _text(err_file)
        if check and process.returncode:
            raise RuntimeError(f"{self.name}: {words!r} failed with {process.returncode}: {out}{err}".strip())
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)

    def configure_network(self, command: Sequence[str], input: str = "") -> None:
        """Run a program of this machine in the network namespace alone: pids that it is given are this process's.

        Raises:
            RuntimeError: it failed; with what it printed.
        """
        done = subprocess.run(
            command,
            input=input,
            capture_output=True,
            text=True,
            timeout=START_S,
            preexec_fn=lambda: os.setns(self._pidfd, os.CLONE_NEWNET),
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)!r} failed: {done.stderr.strip()}")

    def kill(self) -> None:
        """Kill PID 1, and every process with it; returns when all are gone.

        Raises:
            TimeoutError: a process does not die within `END_S`.
        """
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while self._holder.poll() is None:
            for process in self._started:
                process.poll()  # PID 1 is gone once every process is reaped, and these are this process's children
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: a process does not die within {END_S:.0f} s of SIGKILL")
            time.sleep(0.002)
        self._started.clear()

    def close(self) -> None:
        """Kill it if it is up, and let go of what this process holds of it."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()  # also ends one that was never up
        try:
            self.kill()
        finally:
            self._holder.stdout.close()
            if self._starter is not None:
                self._starter.shutdown()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
