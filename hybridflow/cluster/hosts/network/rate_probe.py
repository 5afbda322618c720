"""`python -m hybridflow.cluster.hosts.network.rate_probe`: one host's part of a measurement of rates between all hosts.

Apart from the agent, which imports no torch. `probe.rate` starts it, and it ends with that process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine3d import rendezvous

_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
_REPEATS = 3
_PLACE_IN_GLOO = re.compile(r"\[(enforce fail at )?/[^]]*] ([^.]*!= nullptr\. )?")


def main() -> None:
    """Take part, and print the rates as a line of JSON."""
    plan = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        print(json.dumps(_measured(plan)), flush=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(_PLACE_IN_GLOO.sub("", lines[0]), file=sys.stderr, flush=True)
        os._exit(1)  # threads of a group that has failed may not end
    os._exit(0)


def _measured(plan: dict[str, Any]) -> dict[str, Any]:
    rank, hosts, backend = plan["own"], plan["hosts"], plan["backend"]
    served = None if plan["descriptor"] is None else rendezvous.serve(socket.socket(fileno=plan["descriptor"]))
    store = rendezvous.join(rendezvous.tcp_address(plan["address"], plan["port"]), plan["limit_s"])
    _gather(store, rank, hosts, plan["limit_s"])
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=hosts, timeout=timedelta(seconds=plan["limit_s"])
    )
    nbytes = plan["nbytes"] or _BYTES[backend]
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
    if served is None:
        store.set(f"done/{rank}", "1")
    elif hosts > 1:
        store.wait([f"done/{host}" for host in range(1, hosts)])
    return {
        "backend": backend,
        "nbytes": nbytes,
        "all_reduce": 2 * (hosts - 1) / hosts * all_reduce,
        "weights": weights,
        "ring": around,
    }


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


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
