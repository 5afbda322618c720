"""One host's part of a run's Ray: a directory, a watchdog, a token, and the program that holds its servers.

Imports nothing of Ray's, so that what only starts it is there at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine3d import run_files
from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, UserError, first_line
from engine3d.rendezvous import PORTS_VARIABLE
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes import orphans, watchdog
from hybridflow.cluster.ray import ray_node
from hybridflow.cluster.ray.ray_watch import RayWatch
from hybridflow.errors.log import log

AUTHENTICATION_MODE = "RAY_AUTH_MODE"
LOOPBACK = "127.0.0.1"
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: with 0, Ray takes the loopback address for that of its host."""
_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# In the environment of everything that it starts, and everything that starts in turn.
_MARKER = "HYBRIDFLOW_RAY"
# Its name is short: the path of a socket must stay below 108 characters.
_OF_RAY = "r"
_STOP_LIMIT_S = 90.0  # more than the watchdog's own limits together
SERVERS = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS server"}
"""Ray's servers in messages, by Ray's names."""
_HOLDER = "the holder of Ray's servers"
# A line of the log of one of them: time, level (E: error, F and C: it ends), ids, name, source, text. Not a stack's.
_LOGGED_ERROR = re.compile(
    r"^\[[^\]]* [EFC] [\d ]+\] \(\w+\) \S+: +(?:An unexpected system .* Check failed: )?((?![@*]).*\S)", re.MULTILINE
)
_LOG_BYTES = 65536


# Limits of Ray's own start that can be set, in whole seconds. Others are in its code, of 30 s and more: an attempt that
# ended sooner did not end for want of time.
_START_LIMITS = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s")
# In milliseconds: after which a raylet that cannot reach its runtime environment agent ends.
_AGENT_LIMIT = "RAY_agent_register_timeout_ms"
_LEAST_OWN_LIMIT_S = 20.0


class ServerDied(EngineError):
    """One of Ray's servers ended before Ray had started."""


def check_authentication() -> None:
    """Refuse an environment in which Ray would let anybody in.

    Raises:
        UserError: it says so.
    """
    mode = os.environ.get(AUTHENTICATION_MODE)
    if mode is not None and mode.lower() == "disabled":
        raise UserError(
            f"{AUTHENTICATION_MODE}={mode} in the environment: whoever reaches Ray's ports could run code as "
            f"this user; unset it, or set {AUTHENTICATION_MODE}=token"
        )


def retried[T](limit_s: float, attempt: Callable[[float], T]) -> T:
    """Start Ray, again where one of its servers died or it gave up by one of Ray's own limits.

    A server that dies in two attempts in a row ends the start, as does the limit.

    Args:
        limit_s: of all attempts, `limits.ray_start_s`.
        attempt: starts Ray before a deadline by the monotonic clock. It raises EngineError, caused by ServerDied if a
            server died.

    Raises:
        EngineError: Ray did not start.
    """
    begin = time.monotonic()
    deadline = begin + limit_s
    died = False
    for count in itertools.count(1):
        since = time.monotonic()
        try:
            return attempt(deadline)
        except EngineError as error:
            now = time.monotonic()
            if now >= deadline:
                raise EngineError(too_late(limit_s)) from error
            died_before, died = died, isinstance(error.__cause__, ServerDied)
            took = f"{now - begin:.0f} s" if count == 1 else f"{now - begin:.0f} s and {count} attempts"
            if died_before if died else now - since < _LEAST_OWN_LIMIT_S:
                raise EngineError(f"{error} (after {took}; limits.ray_start_s={limit_s:g})") from error
            log.warning(f"{error}, after {took}; trying again, for {deadline - now:.0f} s more")
    raise AssertionError


def not_started(cause: BaseException) -> EngineError:
    """The error of a start that failed."""
    return EngineError(f"Ray did not start on this machine: {first_line(cause)}")


def too_late(limit_s: float) -> str:
    """The line of a start that took too long."""
    return f"Ray did not start on this machine within limits.ray_start_s={limit_s:g} s"


def set_ray_defaults(start_s: float) -> None:
    """Set environment variables of this process's Ray and of all that it starts, unless they are set.

    Args:
        start_s: limit of its start.
    """
    for name in _START_LIMITS:
        os.environ.setdefault(name, str(math.ceil(start_s)))
    os.environ.setdefault(_AGENT_LIMIT, str(math.ceil(1000 * start_s)))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What a killed worker had started (SGLang's own processes) is killed with it.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    # Processes are for roles: not one for each core before anyone asks.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Added to that of the process: Ray's own 15 leaves ranks a thirtieth of a core next to any other busy process.
    os.environ.setdefault("RAY_worker_niceness", "0")


def import_path() -> list[str]:
    """Import path of this process, for a program that starts elsewhere."""
    return [entry or str(Path.cwd()) for entry in sys.path]


class RayHost:
    """Ray on this host, until `end`: a watchdog ends it all when this process is gone, even by SIGKILL.

    Args:
        address: of this host, at which the others reach its servers; on the loopback interface nobody else does.
        token: without which Ray's servers answer nobody; one is made if None.
        environment: more variables of what belongs to this Ray.
    """

    def __init__(
        self, address: str = LOOPBACK, token: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.address = address
        self.directory, self._owned = orphans.ray_directory()
        name = str(self.directory)
        path = self.directory / "token"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token or secrets.token_hex(32))
        self.variables: dict[str, str | None] = {
            AUTHENTICATION_MODE: "token",
            _TOKEN_FILE: str(path),
            _TOKEN: None,
            LOOPBACK_VARIABLE: "0" if self.is_local else None,
            _MARKER: name,
            **(environment or {}),
        }
        """Environment of what belongs to this Ray: values, or None for what must not be set."""
        marker = f"{_MARKER}={name}"
        command = [sys.executable, "-I", watchdog.__file__, marker, name, run_files.__file__]
        # A session of its own: Ctrl-C is not for the watchdog. Isolated itself, it starts one that needs the path.
        self._watchdog = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path())},
        )
        self._node: RayNode | None = None
        self.watch: RayWatch | None = None
        """Watch of the servers, once it has begun."""
        self.servers: dict[str, int] = {}
        """Process ids by the servers' names in messages, once they have started."""
        self.gcs_address = ""
        """Address of the cluster, once they have."""

    @property
    def driver_variables(self) -> dict[str, str | None]:
        """Environment of a driver that ends by itself: without the mark of processes that end with this Ray."""
        return {name: value for name, value in self.variables.items() if name != _MARKER}

    @property
    def is_local(self) -> bool:
        """True if it is a Ray of this host alone."""
        return self.address == LOOPBACK

    @property
    def ray_directory(self) -> Path:
        """Directory for Ray, which lets every user of the host write to it."""
        return self.directory / _OF_RAY

    def store_file(self, name: str) -> Path:
        """A new path of a file in which processes of this host can meet."""
        return new_store_file(self.directory, name)

    def start_servers(self, deadline: float, *, cpus: int, gcs_address: str | None = None) -> None:
        """Start Ray's servers here: the cluster's head, or a node of the cluster whose GCS server is elsewhere.

        Args:
            deadline: by the monotonic clock.
            cpus: CPU slots.
            gcs_address: of the cluster that it joins; None for a head.

        Raises:
            ServerDied: one of them ended.
            EngineError: they did not start in time.
        """
        self._node = RayNode(
            self.directory,
            self.variables,
            path=import_path(),
            directory=str(self.ray_directory),
            ended=str(self.directory / watchdog.ENDED),
            address=self.address,
            cpus=cpus,
            gcs_address=gcs_address,
            ports=changed_environment(self.variables).get(PORTS_VARIABLE),
        )
        started = self._node.started(deadline)
        self.servers = {SERVERS[name]: pid for name, pid in started["processes"].items() if name in SERVERS}
        self.servers[_HOLDER] = self._node.pid
        self.gcs_address = started["gcs_address"]

    @classmethod
    def with_servers(
        cls, address: str, token: str, environment: Mapping[str, str], limit_s: float, **settings: Any
    ) -> RayHost:
        """Start Ray's servers on this host, and its head if `gcs_address` is None.

        Args:
            address, token, environment: as of the class.
            limit_s: `limits.ray_start_s`.
            settings: of `start_servers`.

        Raises:
            EngineError: they did not start.
        """

        def attempt(deadline: float) -> RayHost:
            host = cls(address, token, environment)
            try:
                host.start_servers(deadline, **settings)
                return host
            except Exception as error:
                host.abandon()
                raise not_started(error) from error
            except BaseException:
                host.abandon()
                raise

        return retried(limit_s, attempt)

    def watch_servers(self, lost: Callable[[str], object], limits: LimitsConfig) -> RayWatch:
        """Watch the servers from now on, until `stop`. Arguments as of `RayWatch`."""
        assert self._node is not None
        node, quiet_s, limit_s = self._node, limits.quiet_s, limits.call_s
        self.watch = RayWatch(self.servers, node.ends, node.read_end, lost, quiet_s=quiet_s, limit_s=limit_s)
        return self.watch

    def tell_watchdog(self, line: str) -> None:
        """Send it a line (`hybridflow.cluster.processes.watchdog`)."""
        if self._watchdog.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed where the end was forced meanwhile
                self._watchdog.stdin.write(f"{line}\n".encode())
                self._watchdog.stdin.flush()

    def kill(self) -> None:
        """Kill all that belongs to it, now."""
        watchdog.kill_run(f"{_MARKER}={self.directory}", str(self.directory))

    def end(self) -> None:
        """End by the watchdog all that it has started, and wait for that. Idempotent."""
        self.tell_watchdog(watchdog.END)
        self.tell_watchdog(watchdog.STOP)
        self._watchdog.communicate(timeout=_STOP_LIMIT_S)

    def abandon(self) -> None:
        """Kill all that belongs to it, and remove its directory."""
        self.tell_watchdog(watchdog.END)
        self.kill()
        self.stop()

    def stop(self) -> None:
        """End it, and remove its directory; say what cannot be ended."""
        if self.watch is not None:
            self.watch.close()
        with cleaning("hybridflow: Ray"):
            self.end()
        if self._node is not None:
            self._node.close()
        if self.directory.exists():  # the watchdog was killed, as by who ends a job
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        self._owned.close()


def new_store_file(directory: Path, name: str) -> Path:
    """A new path of a file in a Ray's directory."""
    return directory / f"store-{name}-{uuid.uuid4().hex}"


class RayNode:
    """The program that holds Ray's servers.

    Args:
        where: for what it prints.
        variables: of its environment.
        settings: what `ray_node` reads.
    """

    def __init__(self, where: Path, variables: Mapping[str, str | None], **settings: Any) -> None:
        self._log = where / "node.log"
        self._ray_logs = Path(settings["directory"]) / "session_latest" / "logs"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C is not for Ray's servers.
            self._process = subprocess.Popen(
                [sys.executable, "-P", ray_node.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=changed_environment(variables),
            )
        self._inbox = b""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its log says why
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def started(self, deadline: float) -> dict[str, Any]:
        """Its first answer.

        Raises:
            ServerDied: a server ended.
            EngineError: there is none before the deadline, or Ray did not start.
        """
        answer = self._next(deadline)
        if answer is None:
            if lines := self._log.read_text(errors="replace").splitlines():
                raise EngineError(lines[-1])
            raise ServerDied("its servers did not answer")
        if self._inbox:  # a server has ended since
            answer = self._next(deadline) or answer
        if "name" in answer:
            raise ServerDied(self._how(answer)[0])
        return answer

    @property
    def ends(self) -> int:
        """Descriptor that can be read once a server, or this program, has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read_end(self) -> tuple[str, bool]:
        """Describe what has ended, and say if it may have been requested."""
        ended = self._next(time.monotonic())
        return (f"{_HOLDER} (process {self.pid}) is gone", True) if ended is None else self._how(ended)

    def _how(self, ended: Mapping[str, Any]) -> tuple[str, bool]:
        """Describe the end of a server, with the error that it has logged, and say if it may have been asked to end."""
        server = f"{SERVERS.get(ended['name'], ended['name'])} (process {ended['pid']})"
        if ended["exited"]:
            return f"{server} ended with exit code {ended['status']}{self._logged_error()}", True
        number = signal.Signals(ended["status"])
        is_own = number == signal.SIGABRT  # its own checks end it so
        logged = self._logged_error() if is_own else ""
        return f"{server} was killed by {number.name}{logged}", number in (signal.SIGTERM, signal.SIGINT)

    def _logged_error(self) -> str:
        """The last error in the servers' logs, the raylet's first, in brackets; empty where there is none."""
        for name in SERVERS:
            with contextlib.suppress(OSError), (self._ray_logs / f"{name}.err").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                if errors := _LOGGED_ERROR.findall(file.read().decode(errors="replace")):
                    return f" ({errors[-1]})"
        return ""

    def close(self) -> None:
        """Wait for its end, if it has not ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_LIMIT_S)
        self._process.stdout.close()

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Its next line; None if it ended, or the deadline passed."""
        while b"\n" not in self._inbox:
            if not select.select([self.ends], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self.ends, 4096)
            if not data:
                return None
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def changed_environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with some variables changed, or not set where their value is None."""
    changed = {**os.environ, **variables}
    return {name: value for name, value in changed.items() if value is not None}
