"""A Ray of this process's own: started on this machine, watched, and ended to the last process."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, first_line
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.driver_link import DriverLink
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes import watchdog
from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.runtime import private_ray
from hybridflow.cluster.runtime.private_ray import PrivateEnvironment, driver_imports, on_loopback
from hybridflow.cluster.runtime.ray_host import LOOPBACK, SERVERS, RayHost, ServerDied
from hybridflow.cluster.runtime.ray_watch import RayWatch
from hybridflow.errors.log import log
from hybridflow.rundir.first_failure import describe, write_failure
from hybridflow.rundir.progress import where_now

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Arguments of `ray.init`: no worker output on the console."""

# Limits of Ray's own start that can be set, in whole seconds. Others are in its code, of 30 s and more: an attempt that
# ended sooner did not end for want of time.
_START_LIMITS = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s")
# In milliseconds: after which a raylet that cannot reach its runtime environment agent ends.
_AGENT_LIMIT = "RAY_agent_register_timeout_ms"
_LEAST_OWN_LIMIT_S = 20.0
# After the limit of Ray's start: a thread says so first, unless Ray keeps all threads of this process from running.
_GIL_S = 5.0
_OTHERS_STOP_S = 30.0
_LOOK_EVERY_S = 0.1


class LocalRay:
    """A Ray for this process, in a `with` block or from `start` to `stop`: of this host, or of all hosts of a launch.

    It starts quietly: no dashboard, no usage statistics, its files in a directory of its own that goes when it stops. A
    watchdog ends all that it started when this process is gone, even by SIGKILL.

    Args:
        cpus: CPU slots that it has on this host; more than there are cores is fine.
        object_store_bytes: shared memory for data between roles; Ray's own choice (30 % of memory) if None.
        limits: how long the start may take, and how long a process of Ray may be stopped; the defaults if None.
        launch: the supervisor of the launch whose driver this process is; None if Ray is this host's alone.
        run: the run's directory, where the watchdog keeps what the run failed of if this process cannot; a launch's
            supervisor does.

    Raises:
        EngineError: Ray did not start.
    """

    def __init__(
        self,
        *,
        cpus: int,
        object_store_bytes: int | None = None,
        limits: LimitsConfig | None = None,
        launch: DriverLink | None = None,
        run: Path | None = None,
    ) -> None:
        self._cpus, self._object_store_bytes, self._limits = cpus, object_store_bytes, limits or LimitsConfig()
        self._launch, self._run = launch, run
        self._host: RayHost | None = None
        self._environment: PrivateEnvironment | None = None
        self._watch: RayWatch | None = None
        self._has_started = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_whole(self) -> bool:
        """Whether none of its parts on this host is gone."""
        return self._watch is None or self._watch.lost is None

    @property
    def hosts(self) -> Sequence[Host]:
        """Its hosts, this one first."""
        if self._launch is not None:
            return self._launch.cluster.hosts
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [Host(0, "this machine", LOOPBACK, cpu_slots=self._cpus, visible=visible)]

    def check(self) -> None:
        """Raise EngineError if a part of it is gone."""
        if self._watch is not None:
            self._watch.check()
        if self._launch is not None and self._launch.lost is not None:
            raise EngineError(self._launch.lost)

    def store_file(self, name: str) -> Path | None:
        """A new file in which ranks can meet; None where they may be on several hosts."""
        assert self._host is not None
        return self._host.store_file(name) if self._host.is_local else None

    def rank_environment(self, host: int) -> dict[str, str]:
        """Environment in which the process groups of a host's ranks listen where they should."""
        return private_ray.rank_environment() if self._launch is None else self._launch.environments[host]

    def start(self) -> None:
        """Start it, again where one of its servers died or it gave up by one of Ray's own limits.

        A server that dies in two attempts in a row ends the start, as does `limits.ray_start_s`.
        """
        for name in _START_LIMITS:
            os.environ.setdefault(name, str(math.ceil(self._limits.ray_start_s)))
        os.environ.setdefault(_AGENT_LIMIT, str(math.ceil(1000 * self._limits.ray_start_s)))
        begin = time.monotonic()
        deadline = begin + self._limits.ray_start_s
        died = False
        for attempt in itertools.count(1):
            since = time.monotonic()
            try:
                self._start_once(deadline)
                return
            except EngineError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise EngineError(_too_long(self._limits.ray_start_s)) from error
                died_before, died = died, isinstance(error.__cause__, ServerDied)
                took = f"{now - begin:.0f} s" if attempt == 1 else f"{now - begin:.0f} s and {attempt} attempts"
                if died_before if died else now - since < _LEAST_OWN_LIMIT_S:
                    limit = f"limits.ray_start_s={self._limits.ray_start_s:g}"
                    raise EngineError(f"{error} (after {took}; {limit})") from error
                line = f"{error}, after {took}; trying again, for {deadline - now:.0f} s more"
                log.warning(line)

    def stop(self) -> None:
        """Stop it, to the last process. Idempotent."""
        whole = self.is_whole
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._launch is not None:
            self._launch.on_lost(None)
        if self._host is not None:
            self._host.tell_watchdog(watchdog.END)
        if whole:
            ray.shutdown()  # would wait for a minute for what is gone
        if self._launch is not None and self._launch.lost is None:
            with cleaning("hybridflow: Ray on other hosts"):
                self._launch.ask("stop_ray", _OTHERS_STOP_S)
        if self._environment is not None:
            self._environment.close(forget=whole)
            self._environment = None
        if self._host is not None:
            host, self._host = self._host, None
            with cleaning("hybridflow: Ray"):
                host.end()
            termination.remove_resort(host.end)
            host.close()

    def _start_once(self, deadline: float) -> None:
        launch = self._launch
        host = self._host = RayHost() if launch is None else RayHost(launch.cluster.head.address, launch.ray_token)
        termination.add_resort(host.end)
        termination.before_force = lambda: host.tell_watchdog(watchdog.END)
        left_s = deadline - time.monotonic()
        host.tell_watchdog(f"{watchdog.WITHIN} {left_s + _GIL_S:g}")
        try:
            self._environment = PrivateEnvironment(host.variables)
            started = host.start_servers(deadline, cpus=self._cpus, object_store_bytes=self._object_store_bytes)
            parts = {SERVERS[name]: pid for name, pid in started["processes"].items() if name in SERVERS}
            limits = self._limits
            for name, pid in parts.items():
                host.tell_watchdog(f"{pid} {name}")
            self._watch = RayWatch(parts, self._lost, quiet_s=limits.quiet_s, limit_s=limits.call_s, how=host.how_ended)
            with self._bounded(deadline), on_loopback() if host.is_local else contextlib.nullcontext():
                ray.init(
                    address=started["gcs_address"],
                    _node_ip_address=host.address,
                    job_config=driver_imports(),
                    **QUIET,
                )
                if launch is not None:
                    self._start_others(launch, started["gcs_address"], deadline)
            host.tell_watchdog(f"{watchdog.WITHIN} 0")
            if self._run is not None and launch is None:
                host.tell_watchdog(f"{watchdog.DIRECTORY} {self._run.resolve()}")
            if launch is not None:
                launch.on_lost(self._lost)
            self._has_started = True
            self._watch.check()
        except Exception as error:
            lost = self._watch.lost if self._watch is not None else None
            cause = error if lost is None else ServerDied(lost)
            self._stop_start()
            raise EngineError(f"Ray did not start on this machine: {first_line(cause)}") from cause
        except BaseException:
            self._stop_start()
            raise

    def _start_others(self, launch: DriverLink, gcs_address: str, deadline: float) -> None:
        """Ray's nodes on the other hosts of a launch."""
        left_s = max(1.0, deadline - time.monotonic())
        launch.ask("start_ray", left_s, gcs_address=gcs_address, start_s=left_s)
        wanted = {host.address: host for host in launch.cluster.hosts}
        while missing := wanted.keys() - {each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]}:
            if time.monotonic() > deadline:
                raise EngineError(f"no node of Ray's on {listed([str(wanted[each]) for each in sorted(missing)])}")
            time.sleep(_LOOK_EVERY_S)

    @contextlib.contextmanager
    def _bounded(self, deadline: float) -> Iterator[None]:
        """Bound what waits within Ray, for longer than Ray lets one set."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        if not termination.end(f"hybridflow: {_too_long(self._limits.ray_start_s)}"):
            self._kill()  # in a program of the user's: without its servers `ray.init` raises

    def _stop_start(self) -> None:
        if self._host is not None:
            self._host.tell_watchdog(watchdog.END)
        # Ray's end would wait in C++ for what stands still, and keep this process's threads from running meanwhile.
        self._kill()
        self.stop()

    def _kill(self) -> None:
        if self._host is not None:
            self._host.kill()

    def _lost(self, line: str) -> None:
        """End the command, or the attempt to start; in a program of the user's, whoever waits for a rank raises."""
        if not self._has_started:
            self._kill()  # `ray.init` raises without its servers, and would wait for them for a minute otherwise
            return
        ends = termination.cause is None and termination.end(f"hybridflow: {line}", lambda: self._keep(line))
        if ends and self._host is not None:  # not before the line is said: Ray may end this process in between
            self._host.tell_watchdog(watchdog.END)

    def _keep(self, line: str) -> None:
        """Have what the run fails of in its directory: Ray may end this process before its last words."""
        if self._run is not None and self._launch is None:
            write_failure(self._run, describe(self._run, line, where_now()))


def _too_long(limit_s: float) -> str:
    return f"Ray did not start on this machine within limits.ray_start_s={limit_s:g} s"
