"""Runs that start in a third of the time: their processes are forked from servers that have imported the stack.

    subprocess.run([warm_python(), "-m", "hybridflow", "train", ...])

It stands for the interpreter. What the run starts with `sys.executable` (Ray's servers and workers, the hosts
of engines) is forked as well; see `launcher`. It runs the product's code, but that its imports are done. Tests of
starts, of ends and of imports, and those that look at the tree of processes, use the interpreter itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.warm import launcher

_ROOT = Path(__file__).parents[3]
_KINDS = ("driver", "head", "rank", "host", "test_rank", "worker")
_VARIABLE = "WARM_PYTHON"
"""Environment variable: the interpreter of the servers that all workers of a test session share."""


@functools.cache
def warm_python() -> str:
    """The interpreter of the session's servers; where there is a GPU, which is not for forks, the usual one."""
    import torch

    if torch.cuda.is_available():
        return sys.executable
    return os.environ.get(_VARIABLE) or str(_servers().executable)


@functools.cache
def _servers() -> WarmServers:
    servers = WarmServers()
    atexit.register(servers.close)
    return servers


def share_servers(paths: Sequence[str]) -> str:
    """Start the servers of the test session whose workers this process starts, and return their interpreter.

    Args:
        paths: of the tests.
    """
    os.environ[_VARIABLE] = str(_servers().executable)
    os.environ[launcher.COLLECTED] = json.dumps(list(paths))
    return os.environ[_VARIABLE]


def refused_starts() -> list[str]:
    """Return the processes that this process's servers have refused to fork, one line each, with why.

    A refused process imports everything itself, which takes ten times as long.
    """
    return _servers().refused() if _servers.cache_info().currsize else []


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Fork the processes that this process starts with `sys.executable` in the block."""
    warm, before = warm_python(), sys.executable
    sys.executable = warm
    try:
        yield
    finally:
        sys.executable = before


class Forked:
    """A process of a Python module, forked from the session's server of a kind.

    Args:
        kind: of the server.
        arguments: of the interpreter, without it.
        environment: of the process. All processes of a kind have the same variables that imports read.
        descriptors: that the process gets, as 0, 1, 2 and so on.
    """

    def __init__(
        self, kind: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        path = str(Path(warm_python()).with_name(kind))
        numbers = list(range(len(descriptors)))
        self._server, self.pid = launcher.ask(path, list(arguments), dict(environment), list(descriptors), numbers)
        assert self.pid, "the server has imported in an environment that differs: see `refused_starts`"

    def kill(self) -> None:
        """Kill the process unless it has ended, and wait until it is gone."""
        with contextlib.suppress(OSError):  # the server closes the connection of a process that has ended
            self._server.shutdown(socket.SHUT_WR)
        self._server.settimeout(60)
        with contextlib.suppress(ConnectionError):
            self._server.recv(4)
        self._server.close()


class WarmServers:
    """Each imports when the first process of its kind is asked for."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="warm-")
        directory = Path(self._directory.name)
        self.executable = directory / "python"
        self.executable.write_text(f"#!{sys.executable} -ISE\n{Path(launcher.__file__).read_text()}")
        self.executable.chmod(0o755)
        self._servers = []
        for kind in _KINDS:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(directory / kind))
                listening.listen(64)
                self._servers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.warm.server", kind, str(self.executable)],
                        stdin=listening.fileno(),
                        stdout=subprocess.PIPE,
                        cwd=_ROOT,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        start_new_session=True,
                    )
                )

    def refused(self) -> list[str]:
        """Return the kind of each process that was not forked, and the variables in which its environment differed."""
        log = self.executable.with_name("refused")
        return log.read_text().splitlines() if log.exists() else []

    def close(self) -> None:
        """End the servers and what they have forked."""
        for server in self._servers:
            assert server.stdout is not None
            server.stdout.close()
        for server in self._servers:
            server.wait(timeout=120)
        self._directory.cleanup()
