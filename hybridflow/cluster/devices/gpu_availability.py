"""Use of a run's GPUs by others before it begins: memory that others hold would be missing in the middle of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from engine3d.errors import UserError
from hybridflow.cluster.devices.nvml import MakeReader, answer
from hybridflow.cluster.hosts.description import listed

if TYPE_CHECKING:
    from hybridflow.cluster.devices.device_map import Node
    from hybridflow.cluster.ray.resource_pool import Bundle

WAIT_S = 20.0
"""Limit of memory coming free, such as that of a run which was killed a moment ago."""
IDLE_BYTES = 2 * 10**9
"""Memory that the driver itself may hold of an idle GPU; 0.65 GB of an H200."""
_POLL_S = 0.5
_ANSWER_S = 30.0
"""Limit of another node's answer beyond that wait; one that does not answer is taken to be free."""
EXPECTED = "them free, or placement.shared_gpus=true"
_MOST_GPUS = 4
_MOST_PROCESSES = 3


@dataclass(frozen=True, slots=True)
class InUse:
    """A GPU that others use.

    Args:
        index: of the GPU, as a recipe counts those of its node.
        number: as nvidia-smi counts them.
        processes: such as "pid 1234 python3"; none where the driver does not say.
    """

    index: int
    number: int
    used_bytes: int
    total_bytes: int
    processes: tuple[str, ...]

    def __str__(self) -> str:
        number = f", nvidia-smi: {self.number}" if self.number != self.index else ""
        users = f", {listed(self.processes, _MOST_PROCESSES)}" if self.processes else ""
        return f"GPU {self.index} ({self.used_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB{number}{users})"


def gpus_in_use(visible: Mapping[int, str], wait_s: float, make_reader: MakeReader | None = None) -> list[InUse]:
    """The GPUs of this node that others use, and still use after `wait_s` seconds; those that cannot be read are none.

    Args:
        visible: each GPU as CUDA_VISIBLE_DEVICES names it, by its index.
    """
    deadline = time.monotonic() + wait_s
    while True:
        in_use_by_others = [_in_use(index, name, make_reader) for index, name in sorted(visible.items())]
        in_use = [gpu for gpu in in_use_by_others if gpu is not None]
        if not in_use or time.monotonic() >= deadline:
            return in_use
        time.sleep(_POLL_S)


def check_gpus_free(visible: Mapping[int, str], wait_s: float) -> None:
    """Refuse GPUs of this machine that others use.

    Args:
        visible: each GPU as CUDA_VISIBLE_DEVICES names it, by its index.
        wait_s: seconds for which their memory may still come free.

    Raises:
        UserError: names the GPUs, how much of them is in use, and by which processes.
    """
    _refuse([("this machine", gpu) for gpu in gpus_in_use(visible, wait_s)])


def check_bundles_free(
    bundles: Iterable[Bundle], nodes: Sequence[Node], wait_s: float, make_reader: MakeReader | None = None
) -> None:
    """Refuse devices of a cluster that others use: every node looks at its own, all at the same time.

    Args:
        bundles: what the run holds; each may stand there several times.
        nodes: of the cluster.
        wait_s: seconds for which their memory may still come free.

    Raises:
        UserError: as `check_gpus_free`.
    """
    import ray  # here, because `hybridflow check` needs none of it
    from ray.exceptions import RayError

    by_node: dict[int, dict[int, Bundle]] = {}
    for bundle in bundles:
        if bundle.device.kind == "cuda":
            by_node.setdefault(bundle.device.node, {})[bundle.device.index] = bundle
    look: Any = ray.remote(num_cpus=0, max_retries=0)(gpus_in_use)
    looking: dict[ray.ObjectRef, int] = {}
    for node, here in by_node.items():
        pinned = look.options(scheduling_strategy=next(iter(here.values())).strategy())
        visible = {index: bundle.visible for index, bundle in here.items()}
        looking[pinned.remote(visible, wait_s, make_reader)] = node
    if not looking:
        return
    done, late = ray.wait(list(looking), num_returns=len(looking), timeout=wait_s + _ANSWER_S)
    for ref in late:
        ray.cancel(ref, force=True)
    in_use_by_others: list[tuple[str, InUse]] = []
    for ref in sorted(done, key=looking.__getitem__):
        with contextlib.suppress(RayError):  # a node that cannot look refuses nothing
            in_use_by_others += [(f"node {nodes[looking[ref]].name}", gpu) for gpu in ray.get(ref)]
    _refuse(in_use_by_others)


def _in_use(index: int, name: str, make_reader: MakeReader | None) -> InUse | None:
    said = answer(name, lambda reader, gpu: (gpu, reader.memory(gpu)), make_reader)
    if said is None or said[1].used_bytes <= IDLE_BYTES:
        return None
    number, memory = said
    return InUse(index, number, memory.used_bytes, memory.total_bytes, tuple(map(_process, memory.processes)))


def _process(pid: int) -> str:
    try:
        return f"pid {pid} {psutil.Process(pid).name()}"
    except psutil.Error:  # of another container, or gone
        return f"pid {pid}"


def _refuse(in_use_by_others: Sequence[tuple[str, InUse]]) -> None:
    if not in_use_by_others:
        return
    described = [f"{gpu} of {host}" for host, gpu in in_use_by_others[:_MOST_GPUS]]
    more = f" and {len(in_use_by_others) - _MOST_GPUS} more" if len(in_use_by_others) > _MOST_GPUS else ""
    raise UserError(f"placement: GPUs in use by others: {', '.join(described)}{more}; expected {EXPECTED}")
