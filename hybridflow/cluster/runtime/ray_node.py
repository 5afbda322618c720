"""One host's servers of a Ray of one run, held by a program of its own: whoever has to end them can, at any moment.

    python -P ray_node.py

Reads one line of JSON with `path` (for imports), `directory` (for Ray's files), `address`, `cpus`,
`object_store_bytes` and `gcs_address` (of the cluster to join; null to be its head) and starts Ray's servers.
`ray.init` would start them within the process that calls it, and wait for them in C++ with no other thread of that
process able to run. Writes lines of JSON: first `gcs_address` and `processes` (process ids by Ray's names), or `error`,
or `name` of a server that ended before; with that, and for each server that ends later, its `pid`, whether it `exited`,
and its `status`: exit code or signal. Ends them, and itself, once its standard input closes; those that have not ended
by themselves until then are first named in the file `ended` (`hybridflow.cluster.processes.watchdog`), if it gives one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import Any


def main() -> int:
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    # What Ray prints is for its log; lines of this program are for who reads them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    starting = _Starting(answers)
    try:
        node = _start(settings, starting)
        starting.end()
    except Exception as error:
        _say(answers, error=(str(error).strip() or type(error).__name__).splitlines()[0])
        return 1
    processes = {name: each[0].process.pid for name, each in node.all_processes.items()}
    _say(answers, gcs_address=node.gcs_address, processes=processes)
    left = _hold(answers, processes)
    with contextlib.suppress(OSError):  # nobody reads it where its directory is gone
        Path(settings["ended"]).write_text(" ".join(map(str, left)))
    node.kill_all_processes(check_alive=False)
    return 0


class _Starting:
    """Servers while Ray starts: Ray itself would wait for the node of a dead one until its limit."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._lock, self._over = threading.Lock(), False
        self._reserved: socket.socket | None = None

    def agent_port(self, address: str) -> int:
        """A port for the raylet's runtime environment agent, which this program keeps from all others.

        The raylet would wait until the agent names one of its own, and end where that takes longer than 15 s. The agent
        reuses the address of a socket that does not listen.
        """
        self._reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((address, 0))
        port: int = self._reserved.getsockname()[1]
        return port

    def watch(self, name: str, pid: int) -> None:
        """End this program, with an answer that says so, where a server ends before Ray has started."""
        threading.Thread(target=self._watch, args=(name, os.pidfd_open(pid), pid), daemon=True).start()

    def end(self) -> None:
        """Ray has started."""
        with self._lock:
            self._over = True

    def _watch(self, name: str, descriptor: int, pid: int) -> None:
        select.select([descriptor], [], [])
        os.close(descriptor)
        with self._lock:
            if not self._over:
                _say(self._answers, name=name, **_how_ended(pid))
                os._exit(1)


def _start(settings: dict[str, Any], starting: _Starting) -> Any:
    from ray import _raylet
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    unused = (
        _raylet.METRICS_AGENT_PORT_NAME,  # type: ignore[attr-defined]
        _raylet.METRICS_EXPORT_PORT_NAME,  # type: ignore[attr-defined]
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,  # type: ignore[attr-defined]
    )

    class Quiet(Node):
        """Without autoscaler, what forwards the workers' output, and the server of a dashboard: nobody asks them."""

        def start_gcs_server(self) -> None:
            super().start_gcs_server()
            self._watch_start("gcs_server")

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            for name in unused:
                # As the dashboard's agent does for what it does not serve. The raylet would wait for it, and end where
                # it takes longer than 15 s on a busy machine.
                _raylet.persist_port(self.get_session_dir_path(), self.node_id, name, -1)  # type: ignore[attr-defined]
            super().start_raylet(*arguments, **named)
            self._watch_start("raylet")

        def _watch_start(self, name: str) -> None:
            starting.watch(name, self.all_processes[name][0].process.pid)

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
        runtime_env_agent_port=starting.agent_port(settings["address"]),
    )
    is_head = settings["gcs_address"] is None
    return Quiet(parameters, head=is_head, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=is_head)


def _hold(answers: Any, processes: dict[str, int]) -> list[int]:
    """Wait until standard input closes, and tell of each process that ends before; those that have not."""
    descriptors: dict[int, int] = {}
    for pid in processes.values():
        with contextlib.suppress(ProcessLookupError):
            descriptors[os.pidfd_open(pid)] = pid
    while True:
        ready, _, _ = select.select([0, *descriptors], [], [])
        ready, _, _ = select.select([0, *descriptors], [], [], 0.0)  # what has ended by itself before that closed
        for descriptor in set(ready) & descriptors.keys():
            pid = descriptors.pop(descriptor)
            with contextlib.suppress(ChildProcessError):
                _say(answers, **_how_ended(pid))
        if 0 in ready and not os.read(0, 4096):
            return list(descriptors.values())


def _how_ended(pid: int) -> dict[str, Any]:
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return {"pid": pid, "exited": result.si_code == os.CLD_EXITED, "status": result.si_status}


def _say(answers: Any, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(fields), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main())
