"""Ray: started on this machine or found in a cluster, watched, and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import ray
from ray._private.node import Node as RayNode
from ray.job_config import JobConfig

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, UserError
from engine3d.rollout import run_files
from hybridflow.cluster import private_ray, watchdog
from hybridflow.cluster.authentication import check_authentication
from hybridflow.cluster.cluster_address import check_cluster_answers
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.private_ray import LOOPBACK, PrivateRay, driver_imports, on_loopback
from hybridflow.cluster.ray_watch import RayWatch
from hybridflow.cluster.termination import termination

# In the environment of everything that a local Ray starts, and everything that starts in turn.
_MARKER = "HYBRIDFLOW_RAY"
_STOP_LIMIT_S = 30.0
# The watchdog of the Ray that this process started; None where there is none, or a cluster's.
_local: subprocess.Popen[bytes] | None = None
# Its directory and environment.
_private: PrivateRay | None = None
# Held as long as that Ray's directory is in use.
_owned: TextIO | None = None
# The thread that watches its processes.
_watch: RayWatch | None = None
_RAY_PREFIX = "hf-ray-"
_LOCK_NAME = re.compile(rf"{_RAY_PREFIX}{run_files.RANDOM}{re.escape(watchdog.LOCK)}")
_LONGEST_PARENT = 24
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
# How a node of Ray starts its autoscaler, what forwards the workers' output, and the server of its dashboard.
# `ray.init` waits for that: two seconds of every start, for nothing here. It has no arguments for these; where a Ray's
# node starts them otherwise, they are started.
_LEFT_OUT = ("start_monitor", "start_log_monitor", "start_api_server")
# Limits of Ray's own start that can be set, in whole seconds. Others are in its code, of 30 s and more: an attempt that
# ended sooner did not end for want of time.
_START_LIMITS = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s")
_LEAST_OWN_LIMIT_S = 20.0
# After the limit of Ray's start: a thread says so first, unless Ray keeps all threads of this process from running.
_GIL_S = 5.0
_PARTS = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS server"}


def start_ray(
    *,
    cpu_slots: int = 0,
    address: str | None = None,
    object_store_bytes: int | None = None,
    limits: LimitsConfig | None = None,
) -> None:
    """Start Ray on this machine, or attach to a cluster.

    Locally it starts quietly: no dashboard, no usage statistics, no worker output on the console, its files in a
    directory of its own that goes when it stops. A watchdog ends all that it started when this process is gone, even by
    SIGKILL.

    Args:
        cpu_slots: how many CPU slots the recipe places roles on; more than there are cores is fine.
        address: of a running cluster ("auto", "host:6379" or "ray://..."); None starts one.
        object_store_bytes: shared memory for data between roles; Ray's own choice (30 % of memory) if None.
        limits: how long the start may take, and how long a process of Ray may be stopped; the defaults if None.

    Raises:
        UserError: no cluster at `address`, or the environment lets anybody into Ray.
        EngineError: Ray did not start.
    """
    check_authentication()
    limits = limits or LimitsConfig()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What a killed worker had started (SGLang's own processes) is killed with it.
    os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")
    # Processes are for roles: not one for each core before anyone asks.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    for name in _START_LIMITS:
        os.environ.setdefault(name, str(math.ceil(limits.ray_start_s)))
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _attach(address)
        else:
            _start_in_time(max(os.cpu_count() or 1, cpu_slots), object_store_bytes, limits)
    finally:
        # Ray puts a handler of its own in place, which would end this process before it has put anything away.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)


def _attach(address: str) -> None:
    check_cluster_answers(address)
    try:
        # A Ray client has no workers of its own: those of its server import what that says.
        job = JobConfig() if address.startswith("ray://") else driver_imports()
        ray.init(address=address, job_config=job, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address}: {_first_line(error)}") from None


def _start_in_time(cpus: int, object_store_bytes: int | None, limits: LimitsConfig) -> None:
    """Start Ray, again where it gave up by one of its own limits before that of the recipe."""
    timer = threading.Timer(limits.ray_start_s, _give_up_start, (limits.ray_start_s,))
    timer.daemon = True
    timer.start()
    try:
        _start_until(cpus, object_store_bytes, limits)
    finally:
        timer.cancel()


def _give_up_start(limit_s: float) -> None:
    """End a start of Ray that waits within Ray, for longer than Ray lets one set."""
    if termination.end(f"hybridflow: Ray did not start on this machine within limits.ray_start_s={limit_s:g} s"):
        return
    directory = os.environ.get(_MARKER)
    if directory is not None:  # in a program of the user's: without its servers `ray.init` raises
        watchdog.kill_run(f"{_MARKER}={directory}", directory)


def _start_until(cpus: int, object_store_bytes: int | None, limits: LimitsConfig) -> None:
    begin = time.monotonic()
    for attempt in itertools.count(1):
        since = time.monotonic()
        try:
            _start_here(cpus, object_store_bytes, limits)
            return
        except EngineError as error:
            now = time.monotonic()
            took = f"{now - begin:.0f} s" if attempt == 1 else f"{now - begin:.0f} s and {attempt} attempts"
            left_s = limits.ray_start_s - (now - begin)
            if now - since < _LEAST_OWN_LIMIT_S or left_s <= 0:
                raise EngineError(f"{error} (after {took}; limits.ray_start_s={limits.ray_start_s:g})") from error
            line = f"{error}, after {took}; trying again, for {left_s:.0f} s more"
            print(f"hybridflow: {line}", file=sys.stderr, flush=True)


def _start_here(cpus: int, object_store_bytes: int | None, limits: LimitsConfig) -> None:
    global _local, _owned, _private, _watch
    directory, _owned = run_directory(_parent())
    command = [sys.executable, "-I", watchdog.__file__, f"{_MARKER}={directory}", directory, run_files.__file__]
    # A session of its own: Ctrl-C is not for the watchdog.
    _local = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.environ[_MARKER] = directory
    termination.add_resort(_end_local)
    termination.before_force = lambda: _tell_watchdog(watchdog.END)
    _tell_watchdog(f"{watchdog.WITHIN} {limits.ray_start_s + _GIL_S:g}")
    try:
        _private = PrivateRay(Path(directory))
        with _only_what_is_needed(), on_loopback():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                _temp_dir=str(_private.ray_directory),
                _node_ip_address=LOOPBACK,
                job_config=driver_imports(),
                **_QUIET,
            )
        processes = {_PARTS[name]: pid for name, pid in _ray_processes().items() if name in _PARTS}
        _tell_watchdog(f"{watchdog.WITHIN} 0")
        for name, pid in processes.items():
            _tell_watchdog(f"{pid} {name}")
        _watch = RayWatch(processes, _lost, quiet_s=limits.quiet_s, limit_s=limits.call_s)
    except Exception as error:
        _stop_start(directory)
        raise EngineError(f"Ray did not start on this machine: {_first_line(error)}") from error
    except BaseException:
        _stop_start(directory)
        raise


def _stop_start(directory: str) -> None:
    """Stop a Ray that has not started, and may be standing still."""
    # Its end would wait for what stands still in C++, and keep every thread of this process from running meanwhile.
    watchdog.kill_run(f"{_MARKER}={directory}", directory)
    stop_ray()


@contextlib.contextmanager
def _only_what_is_needed() -> Iterator[None]:
    """Let a Ray that is started in the block have no processes but its server, its scheduler and the agents of that."""
    methods = {name: getattr(RayNode, name) for name in _LEFT_OUT if hasattr(RayNode, name)}
    for name in methods:
        setattr(RayNode, name, lambda node, **_: None)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(RayNode, name, method)


def remove_orphans() -> None:
    """Remove what runs of this machine have left whose driver and watchdog were killed together.

    `start_ray` and the start of an engine do so too; this is for a run that needs neither.
    """
    _remove_orphans(_parent())
    run_files.remove_orphans()


def _parent() -> Path:
    """Where Ray's directories are made: the path of a socket must stay below 108 characters; Ray itself takes 65."""
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) <= _LONGEST_PARENT else "/tmp")


def _remove_orphans(parent: Path) -> None:
    for lock in run_files.named_like(parent, _LOCK_NAME):
        with contextlib.suppress(OSError), run_files.open_own(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            directory = lock.with_suffix("")
            if directory.exists(follow_symlinks=False) and not run_files.is_own(directory.lstat(), stat.S_IFDIR):
                continue
            shutil.rmtree(directory, ignore_errors=True)
            lock.unlink()


def run_directory(parent: Path) -> tuple[str, TextIO]:
    """A new directory for Ray's files, and the lock by which this process owns it.

    Those whose owner is gone are removed first: where driver and watchdog were killed together, nobody was left to.
    """
    _remove_orphans(parent)
    while True:
        # Beside the directory, because who has a file open in it is taken for a process of the run.
        descriptor, name = tempfile.mkstemp(prefix=_RAY_PREFIX, suffix=watchdog.LOCK, dir=parent)
        os.close(descriptor)
        owned = _hold(Path(name))
        if Path(name).exists():  # another run may have taken it for an orphan's before it was locked
            break
        owned.close()
    directory = Path(name).with_suffix("")
    directory.mkdir(mode=0o700)
    return str(directory), owned


def _hold(path: Path) -> TextIO:
    lock = path.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def stop_ray() -> None:
    """Stop what `start_ray` started, to the last process, or leave the cluster that it attached to."""
    global _local, _owned, _private, _watch
    gone = _watch is not None and _watch.lost is not None
    if _watch is not None:
        _watch.close()
        _watch = None
    if _local is not None:
        _tell_watchdog(watchdog.END)
    if not gone:
        ray.shutdown()  # would wait for a minute for what is gone
    if _private is not None:
        _private.close()
        _private = None
    if _local is not None:
        del os.environ[_MARKER]
        with cleaning("hybridflow: Ray"):
            _end_local()
        termination.remove_resort(_end_local)
        _local = None
    if _owned is not None:
        Path(_owned.name).unlink(missing_ok=True)
        _owned.close()
        _owned = None


def is_started_here() -> bool:
    """Whether this process started the Ray that it uses."""
    return _local is not None


def ray_answers() -> bool:
    """Whether Ray is there to be asked to end something.

    Not where a part of it is gone. Nor a local one while the command ends by a signal, which its parts may have got as
    well, as from Slurm: the watchdog ends them all.
    """
    if not ray.is_initialized():
        return False
    return _local is None or (termination.cause is None and (_watch is None or _watch.lost is None))


def check_ray() -> None:
    """Raise EngineError if a part of the Ray that this process has started is gone."""
    if _watch is not None:
        _watch.check()


def _lost(line: str) -> None:
    """End the command; in a program that is not the command, whoever waits for a rank raises."""
    if termination.cause is None and termination.end(f"hybridflow: {line}"):
        _tell_watchdog(watchdog.END)


def _ray_processes() -> dict[str, int]:
    """Process ids of the servers of the Ray that this process has started, by Ray's names."""
    node = ray._private.worker._global_node
    return {name: each[0].process.pid for name, each in node.all_processes.items()} if node is not None else {}


def _tell_watchdog(line: str) -> None:
    if _local is not None and _local.stdin is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed where the end was forced meanwhile
            _local.stdin.write(f"{line}\n".encode())
            _local.stdin.flush()


def _end_local() -> None:
    """Have the watchdog end all that this Ray has started, and wait until it has. Idempotent."""
    if _local is not None:
        _local.communicate(timeout=_STOP_LIMIT_S)


def store_file(name: str) -> Path | None:
    """A new file in which ranks can meet; None where they may be on several hosts, and have to meet at a server."""
    return _private.store_file(name) if _private is not None else None


def rank_environment() -> dict[str, str]:
    """Environment of every rank."""
    # Not for what a rank starts either: `python -m` would import from the working directory first.
    return {"PYTHONSAFEPATH": "1"} | (private_ray.rank_environment() if _private is not None else {})


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
