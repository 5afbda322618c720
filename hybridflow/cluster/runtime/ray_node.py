"""One host's servers of a Ray of one run, held by a program of its own: whoever has to end them can, at any moment.

    python -P ray_node.py

Reads one line of JSON with `path` (for imports), `directory` (for Ray's files), `address`, `cpus`, `object_store_bytes`
and `gcs_address` (of the cluster to join; null to be its head) and starts Ray's servers; `ray.init` would start them
within the process that calls it, and wait for them in C++ with no other thread of that process able to run. Writes
lines of JSON: first `gcs_address` and `processes` (process ids by Ray's names), or `error`; then for each server that
ends its `pid`, whether it `exited`, and its `status`: exit code or signal. Ends them, and itself, once its standard
input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from typing import Any


def main() -> int:
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    # What Ray prints is for its log; lines of this program are for who reads them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        node = _start(settings)
    except Exception as error:
        _say(answers, error=(str(error).strip() or type(error).__name__).splitlines()[0])
        return 1
    processes = {name: each[0].process.pid for name, each in node.all_processes.items()}
    _say(answers, gcs_address=node.gcs_address, processes=processes)
    _hold(answers, processes)
    node.kill_all_processes(check_alive=False)
    return 0


def _start(settings: dict[str, Any]) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Quiet(Node):
        """Without autoscaler, what forwards the workers' output, and the server of a dashboard: nobody asks them."""

        def start_monitor(self) -> None:
            pass

        def start_log_monitor(self) -> None:
            pass

        def start_api_server(self, **_: Any) -> None:
            pass

    parameters = RayParams(
        node_ip_address=settings["address"],
        num_cpus=settings["cpus"],
        object_store_memory=settings["object_store_bytes"],
        include_dashboard=False,
        temp_dir=settings["directory"],
        gcs_address=settings["gcs_address"],
    )
    is_head = settings["gcs_address"] is None
    return Quiet(parameters, head=is_head, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=is_head)


def _hold(answers: Any, processes: dict[str, int]) -> None:
    """Wait until standard input closes, and tell of each process that ends before."""
    descriptors: dict[int, int] = {}
    for pid in processes.values():
        with contextlib.suppress(ProcessLookupError):
            descriptors[os.pidfd_open(pid)] = pid
    while True:
        ready, _, _ = select.select([0, *descriptors], [], [])
        for descriptor in set(ready) & descriptors.keys():
            pid = descriptors.pop(descriptor)
            with contextlib.suppress(ChildProcessError):
                result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert result is not None
                _say(answers, pid=pid, exited=result.si_code == os.CLD_EXITED, status=result.si_status)
        if 0 in ready and not os.read(0, 4096):
            return


def _say(answers: Any, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(fields), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main())
