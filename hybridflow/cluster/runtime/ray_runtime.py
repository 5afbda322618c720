"""The Ray that this process uses: one that it has started, or a cluster that it is attached to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from engine3d.errors import UserError, first_line
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.driver_link import driver_link
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.runtime import private_ray
from hybridflow.cluster.runtime.authentication import check_authentication
from hybridflow.cluster.runtime.cluster_address import check_cluster_answers
from hybridflow.cluster.runtime.local_ray import QUIET, LocalRay
from hybridflow.cluster.runtime.private_ray import driver_imports
from hybridflow.cluster.runtime.ray_host import set_ray_defaults

# None where there is none, or a cluster's.
_local: LocalRay | None = None


def start_ray(
    *,
    cpu_slots: int = 0,
    address: str | None = None,
    object_store_bytes: int | None = None,
    limits: LimitsConfig | None = None,
    run: Path | None = None,
) -> None:
    """Start Ray on this machine, or on all hosts of the launch whose driver this process is; or attach to a cluster.

    Args:
        cpu_slots: how many CPU slots the recipe places roles on; more than there are cores is fine. A launch's hosts
            have those that their agents say.
        address: of a running cluster ("auto", "host:6379" or "ray://..."); None starts one.
        object_store_bytes: shared memory for data between roles; Ray's own choice (30 % of memory) if None.
        limits: how long the start may take, and how long a process of Ray may be stopped; the defaults if None.
        run: the run's directory, if it is for a run.

    Raises:
        UserError: no cluster at `address`, or the environment lets anybody into Ray.
        EngineError: Ray did not start.
    """
    global _local
    check_authentication()
    set_ray_defaults()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _attach(address)
        else:
            launch = driver_link()
            cpus = max(os.cpu_count() or 1, cpu_slots) if launch is None else launch.cluster.head.cpu_slots
            local = LocalRay(cpus=cpus, object_store_bytes=object_store_bytes, limits=limits, launch=launch, run=run)
            local.start()
            _local = local
    finally:
        # Ray puts a handler of its own in place, which would end this process before it has put anything away.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)


def _attach(address: str) -> None:
    check_cluster_answers(address)
    private_ray.forget_token()
    try:
        # A Ray client has no workers of its own: those of its server import what that says.
        imports: dict[str, Any] = {} if address.startswith("ray://") else {"job_config": driver_imports()}
        ray.init(address=address, **imports, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """A Ray client puts the server's stack below its first line; what went wrong there is the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return first_line(error) if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def stop_ray() -> None:
    """Stop what `start_ray` started, to the last process, or leave the cluster that it attached to."""
    global _local
    if _local is None:
        ray.shutdown()
        return
    local, _local = _local, None
    local.stop()


def started_hosts() -> Sequence[Host] | None:
    """The hosts of the Ray that this process has started, this one first; None where it is attached to another's."""
    return _local.hosts if _local is not None else None


def ray_answers() -> bool:
    """Whether Ray is there to be asked to end something.

    Not where a part of it is gone. Nor a local one while the command ends by a signal, which its parts may have got as
    well, as from Slurm: the watchdog ends them all.
    """
    if not ray.is_initialized():
        return False
    return _local is None or (termination.cause is None and _local.is_whole)


def check_ray() -> None:
    """Raise EngineError if a part of the Ray that this process has started is gone."""
    if _local is not None:
        _local.check()


def store_file(name: str) -> Path | None:
    """A new file in which ranks can meet; None where they may be on several hosts, and have to meet at a server."""
    return _local.store_file(name) if _local is not None else None


def rank_environment(node: int) -> dict[str, str]:
    """Environment of every rank on a node, which `resource_pool.cluster_nodes` counts."""
    # Not for what a rank starts either: `python -m` would import from the working directory first.
    return {"PYTHONSAFEPATH": "1"} | (_local.rank_environment(node) if _local is not None else {})
