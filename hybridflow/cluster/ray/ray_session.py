"""Ray session of this process: a Ray started for it on this host, that of a launch's hosts, or a running cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.job_config import JobConfig
from ray.util import get_node_ip_address

from engine3d.environment import exchange_variables
from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.driver_link import DriverLink, driver_link
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes import watchdog
from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.ray.cluster_address import check_cluster_answers
from hybridflow.cluster.ray.ray_host import (
    LOOPBACK,
    LOOPBACK_VARIABLE,
    RayHost,
    ServerDied,
    check_authentication,
    new_store_file,
    not_started,
    retried,
    set_ray_defaults,
    too_late,
)
from hybridflow.cluster.ray.ray_watch import RayWatch
from hybridflow.errors.log import log
from hybridflow.rundir.file_names import HOSTS
from hybridflow.rundir.status.first_failure import describe, write_failure
from hybridflow.rundir.status.hosts_file import RunHost, write_hosts
from hybridflow.rundir.status.progress import where_now

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Arguments of `ray.init`: no worker output on the console."""

_INTERFACE = "lo"
# After the limit of Ray's start: a thread says so first, unless Ray keeps all threads of this process from running.
_GIL_S = 5.0
_LOOK_EVERY_S = 0.1


class RaySession:
    """A Ray that this process uses, in a `with` block or from `start` to `stop`.

    Without `address` and `launch` it starts one on this host: no dashboard, no usage statistics, its files in a
    directory of its own that goes when it stops. A watchdog ends all that it started when this process is gone, even by
    SIGKILL. A launch's agents have started one on all hosts, and end it.

    Args:
        cpus: CPU slots on this host; more than there are cores is fine.
        limits: of the start, and of a process of Ray that is stopped; the defaults if None.
        run: the run's directory, where the watchdog writes the cause of a failure if this process cannot.
        address: of a running cluster.
        launch: that has started this process as its driver.
    """

    def __init__(
        self,
        *,
        cpus: int = 1,
        limits: LimitsConfig | None = None,
        run: Path | None = None,
        address: str | None = None,
        launch: DriverLink | None = None,
    ) -> None:
        self._cpus, self._limits = cpus, limits or LimitsConfig()
        self._run, self._address = run, address
        self.launch = launch
        self._host: RayHost | None = None
        self._environment: _Environment | None = None
        self._has_started = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_complete(self) -> bool:
        """True if no server on this host is known to be gone."""
        if self.launch is not None:
            return self.launch.lost is None or self.launch.lost_host != str(self.launch.head)
        return self._watch is None or self._watch.lost is None

    @property
    def _watch(self) -> RayWatch | None:
        return self._host.watch if self._host is not None else None

    @property
    def answers(self) -> bool:
        """True if Ray can be asked to end something.

        False while the command ends by a signal, which Ray's servers may have got too, as from Slurm: the watchdog or
        the launch's agents end them all.
        """
        return self._address is not None or (termination.cause is None and self.is_complete)

    @property
    def hosts(self) -> Sequence[Host] | None:
        """Hosts of the run, this one first; None in a cluster that somebody else has started."""
        if self.launch is not None:
            return self.launch.hosts
        if self._address is not None:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [Host(0, "this machine", LOOPBACK, cpu_slots=self._cpus, visible=visible)]

    def check(self) -> None:
        """Raise EngineError if a server or a host is gone."""
        if self._watch is not None:
            self._watch.check()
        if self.launch is not None and self.launch.lost is not None:
            raise EngineError(self.launch.lost)

    def store_file(self, name: str) -> Path | None:
        """A new path of a file in which ranks of this host can meet; None where they may be on several hosts."""
        if self._host is not None:
            return self._host.store_file(name)
        if self.launch is not None and self.launch.head.address == LOOPBACK:
            return new_store_file(self.launch.ray_directory, name)
        return None

    def rank_environment(self, host: int) -> Mapping[str, str]:
        """Environment by which process groups of a host's ranks listen at its interface in the cluster."""
        if self.launch is not None:
            return self.launch.environments[host]
        if self._address is not None:
            return {}
        return {"GLOO_SOCKET_IFNAME": _INTERFACE, "NCCL_SOCKET_IFNAME": _INTERFACE}

    def start(self) -> None:
        """Start Ray, or attach to it.

        Raises:
            EngineError: Ray did not start.
            UserError: no cluster at the address, or Ray was imported before `hybridflow`.
        """
        set_ray_defaults(self._limits.ray_start_s)
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            if self._address is not None:
                self._attach(self._address)
            elif self.launch is not None:
                self._join(self.launch)
            else:
                _check_loopback()
                retried(self._limits.ray_start_s, self._start_host)
        finally:
            # Ray sets a handler of its own, which would end this process before it has put anything away.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_terminate)

    def stop(self) -> None:
        """Stop what this session has started, to the last process; leave what it has joined. Idempotent."""
        is_complete = self.is_complete
        if self._watch is not None:
            self._watch.close()
        if self.launch is not None:
            self.launch.on_lost(None)
        if self._host is not None:
            self._host.tell_watchdog(watchdog.END)
        if is_complete:
            ray.shutdown()  # would wait for a minute for a server that is gone
        if self._environment is not None:
            self._environment.close(forget=is_complete)
            self._environment = None
        if self._host is not None:
            host, self._host = self._host, None
            termination.remove_resort(host.end)
            host.stop()

    def _attach(self, address: str) -> None:
        check_cluster_answers(address, attaches=True)
        forget_token()
        try:
            # A Ray client has no workers of its own: those of its server import what that says.
            imports: dict[str, Any] = {} if address.startswith("ray://") else {"job_config": driver_imports()}
            ray.init(address=address, **imports, **QUIET)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UserError(f"no Ray cluster at {address}: {_reason(error)}") from None

    def _join(self, launch: DriverLink) -> None:
        """Attach to the Ray of a launch's hosts."""
        if launch.head.address == LOOPBACK:
            _check_loopback()
        deadline = time.monotonic() + self._limits.ray_start_s
        with contextlib.suppress(OSError):  # its directory is gone: so is Ray, as the next line finds
            (launch.ray_directory / watchdog.DRIVER).write_text(str(os.getpid()))
        try:
            self._init(launch.gcs_address, launch.head.address, deadline)
            while missing := _hosts_without_node(launch.hosts):
                if launch.lost is not None or time.monotonic() > deadline:
                    raise EngineError(f"no node of Ray's on {listed([str(host) for host in missing])}")
                time.sleep(_LOOK_EVERY_S)
        except Exception as error:
            self.stop()
            raise (not_started(error) if launch.lost is None else EngineError(launch.lost)) from error
        self._has_started = True
        launch.on_lost(self._lost)

    def _start_host(self, deadline: float) -> None:
        host = self._host = RayHost()
        termination.add_resort(host.end)
        termination.before_force = lambda: host.tell_watchdog(watchdog.END)
        host.tell_watchdog(f"{watchdog.WITHIN} {deadline - time.monotonic() + _GIL_S:g}")
        try:
            self._environment = _Environment(host.variables)
            host.start_servers(deadline, cpus=self._cpus)
            for name, pid in host.servers.items():
                host.tell_watchdog(f"{pid} {name}")
            watch = host.watch_servers(self._lost, self._limits)
            self._init(host.gcs_address, host.address, deadline)
            host.tell_watchdog(f"{watchdog.WITHIN} 0")
            if self._run is not None:
                host.tell_watchdog(f"{watchdog.DIRECTORY} {self._run.resolve()}")
            self._has_started = True
            watch.check()
        except Exception as error:
            lost = self._watch.lost if self._watch is not None else None
            cause = error if lost is None else ServerDied(lost)
            self._stop_start()
            raise not_started(cause) from cause
        except BaseException:
            self._stop_start()
            raise

    def _init(self, gcs_address: str, own_address: str, deadline: float) -> None:
        """Attach this process, within a limit: Ray lets one set no shorter one than its own."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._give_up)
        timer.daemon = True
        timer.start()
        try:
            ray.init(address=gcs_address, _node_ip_address=own_address, job_config=driver_imports(), **QUIET)
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        if not termination.end(f"hybridflow: {too_late(self._limits.ray_start_s)}"):
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
        """Write the cause into the run's directory: Ray may end this process before its last words."""
        if self._run is not None and self.launch is None:
            write_failure(self._run, describe(self._run, line, where_now()))


@dataclass
class SessionState:
    """State of a session that other modules keep in it.

    Args:
        actors: of nodes. Those that were checked have the number of their host.
        apart: numbers of hosts that do not see the directory of runs of the driver.
        logs: copies of their logs.
    """

    actors: dict[Host, Any] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    logs: Any = None


_session: RaySession | None = None
_state = SessionState()


def session_state() -> SessionState:
    """State of this process's session."""
    return _state


def is_complete() -> bool:
    """True if this process has a session of which no server on this host is gone."""
    return _session is not None and _session.is_complete


def start_ray(
    *,
    cpu_slots: int = 0,
    address: str | None = None,
    limits: LimitsConfig | None = None,
    run: Path | None = None,
) -> RaySession:
    """Start this process's session, if it has none: on this host, on all hosts of its launch, or in a cluster.

    Args:
        cpu_slots: CPU slots on which the recipe places roles; more than there are cores is fine. A launch's hosts have
            those that their agents say.
        address: of a running cluster ("auto", "host:6379" or "ray://...").
        limits, run: as of `RaySession`.

    Raises:
        UserError: the environment lets anybody into Ray, or this process uses one already, as by `ray.init`; or as
            `RaySession.start`.
        EngineError: as `RaySession.start`.
    """
    global _session
    check_authentication()
    if _session is None:
        if ray.is_initialized():
            raise UserError("Ray is running in this process, as by ray.init(), expected it to be shut down")
        session = RaySession(
            cpus=max(os.cpu_count() or 1, cpu_slots),
            limits=limits,
            run=run,
            address=address,
            launch=driver_link() if address is None else None,
        )
        session.start()
        _session = session
    return _session


def stop_ray() -> None:
    """Stop this process's session, if it has one."""
    global _session, _state
    session, state = _session, _state
    try:
        if state.logs is not None:
            if ray_answers():
                state.logs.copy_all()
            state.logs.close()
    finally:
        _session, _state = None, SessionState()
        if session is not None:
            session.stop()
        else:
            ray.shutdown()


def started_hosts() -> Sequence[Host] | None:
    """Hosts of the run, this one first; None without a session, and in a cluster that somebody else has started."""
    return _session.hosts if _session is not None else None


def ray_answers() -> bool:
    """True if Ray can be asked to end something."""
    return ray.is_initialized() and (_session is None or _session.answers)


def check_ray() -> None:
    """Raise EngineError if a server or a host of this process's Ray is gone."""
    if _session is not None:
        _session.check()


def store_file(name: str) -> Path | None:
    """A new file in which ranks can meet; None where they may be on several hosts, and have to meet at a server."""
    return _session.store_file(name) if _session is not None else None


def rank_environment(node: int) -> dict[str, str]:
    """Environment of every rank on a node, counted as by `resource_pool.cluster_nodes`."""
    # Not for processes that a rank starts either: `python -m` would import from the working directory first.
    return {"PYTHONSAFEPATH": "1", **(_session.rank_environment(node) if _session is not None else {})}


def keep_hosts(directory: Path) -> None:
    """Write hosts and network variables of this process's launch into the run's directory, if there is a launch.

    Args:
        directory: of the run.
    """
    if (launch := driver_link()) is None:
        return
    records = [
        RunHost(
            name=host.name,
            address=host.address,
            interface=host.interface,
            role=host.role,
            gpus=host.gpus,
            cpu_slots=host.cpu_slots,
            settings=tuple(settings),
            shares_disk=host.index not in _state.apart,
        )
        for host, settings in zip(launch.hosts, launch.settings, strict=True)
    ]
    try:
        write_hosts(directory, records)
    except OSError as error:
        log.warning(f"{directory / HOSTS} cannot be written: {error.strerror}")


def driver_imports() -> JobConfig:
    """A job whose workers import from where this process does, and from the working directory only if it does."""
    config = JobConfig()
    # Each worker puts one after another in front of its own.
    config._py_driver_sys_path = _Final(entry or str(Path.cwd()) for entry in reversed(sys.path))
    return config


class _Final(list[str]):
    def extend(self, values: Iterable[str]) -> None:
        """Ray would add the directory of the script, which is there already, and the working directory."""


def forget_token() -> None:
    """Forget mode and token in Ray's libraries in this process, which read them once: they read them again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class _Environment:
    """Environment in which this process uses a Ray with a token of its own, until `close`.

    Args:
        variables: values, or None for variables that must not be set.
    """

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        self._before = exchange_variables(variables)
        forget_token()

    def close(self, *, forget: bool = True) -> None:
        """Restore the environment.

        Args:
            forget: the token too. A Ray that was not shut down has threads in this process that still ask with it.
        """
        exchange_variables(self._before)
        if forget:
            forget_token()


def _check_loopback() -> None:
    """Refuse a Ray library that would look for a Ray of this host at the host's address in the network.

    Ray reads the variable that `hybridflow` sets when it is imported, and never again.

    Raises:
        UserError: Ray was imported before `hybridflow`.
    """
    if get_node_ip_address() != LOOPBACK:
        raise UserError(
            "Ray was imported before hybridflow, and would listen at this host's address in the network: expected "
            f"`import hybridflow` first, or {LOOPBACK_VARIABLE}=0 in the environment"
        )


def _hosts_without_node(hosts: Iterable[Host]) -> list[Host]:
    living = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return [host for host in hosts if host.address not in living]


def _reason(error: Exception) -> str:
    """Lines of an error of Ray: a client's has the server's stack below its first line, with the reason at the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return first_line(error) if len(lines) < 2 else f"{lines[0]} {lines[-1]}"
