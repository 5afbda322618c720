"""Rates that all hosts reach together, each measured by a process of its own."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine3d import rendezvous
from engine3d.errors import EngineError

_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
_REPEATS = 3
_SOURCE_OF_GLOO = re.compile(r"\[(enforce fail at )?/[^]]*] ([^.]*!= nullptr\. )?")


@dataclass(frozen=True, slots=True)
class Rate:
    """Rates of all hosts together, as one of them measured them. In GB/s of 10^9 bytes.

    Args:
        backend: "gloo", between memories of hosts, or "nccl", between their first GPUs.
        nbytes: sent at once.
        all_reduce: bus bandwidth of an all-reduce over all hosts: 2 (n - 1) / n of its bytes over its time.
        weights: of a broadcast from host 0.
        ring: at which this host received from the one before it, while all did the same.
    """

    backend: str
    nbytes: int
    all_reduce: float
    weights: float
    ring: float


def measure(
    listening: socket.socket | None,
    rank: int,
    hosts: int,
    address: str,
    port: int,
    backend: str,
    limit_s: float,
    nbytes: int | None = None,
) -> Rate:
    """Take part in a measurement.

    Args:
        listening: socket for the store, on host 0.
        rank: index of this host.
        hosts: number of hosts.
        address, port: of that socket.
        backend: "gloo" or "nccl". Their environment variables name the cluster's interface.
        limit_s: of each wait.
        nbytes: to be sent at once. None for the backend's default.

    Raises:
        EngineError: it failed.
    """
    try:
        served = None if listening is None else rendezvous.serve(listening)
        store = rendezvous.join(rendezvous.tcp_address(address, port), limit_s)
        _gather(store, rank, hosts, limit_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=hosts, timeout=timedelta(seconds=limit_s))
        rate = _measured(rank, hosts, backend, nbytes or _BYTES[backend])
        if served is None:
            store.set(f"done/{rank}", "1")
        elif hosts > 1:
            store.wait([f"done/{host}" for host in range(1, hosts)])
        return rate
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError(f"rate between hosts: {_SOURCE_OF_GLOO.sub('', lines[0])}") from None


def _measured(rank: int, hosts: int, backend: str, nbytes: int) -> Rate:
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    data = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    received = torch.empty_like(data)

    def ring() -> None:
        both = [
            dist.P2POp(dist.isend, data, (rank + 1) % hosts),
            dist.P2POp(dist.irecv, received, (rank - 1) % hosts),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    times = [
        _seconds(lambda: dist.all_reduce(data), device),
        _seconds(lambda: dist.broadcast(data, 0), device),
        _seconds(ring, device),
    ]
    all_reduce, weights, around = (nbytes / seconds / 1e9 for seconds in times)
    return Rate(backend, nbytes, 2 * (hosts - 1) / hosts * all_reduce, weights, around)


def _gather(store: dist.Store, rank: int, hosts: int, limit_s: float) -> None:
    """Wait until every host is there."""
    deadline = time.monotonic() + limit_s
    store.set(f"there/{rank}", "1")
    for host in range(hosts):
        try:
            store.wait([f"there/{host}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except dist.DistStoreError:
            raise TimeoutError(f"host {host} did not come within {limit_s:g} s") from None


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few, after one that connects."""
    times = []
    for _ in range(1 + _REPEATS):
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
