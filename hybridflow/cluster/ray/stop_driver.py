"""`python -m hybridflow.cluster.ray.stop_driver SECONDS`: lets a run save before a pod of it goes.

What Kubernetes calls before it ends a pod (preStop), of whichever node of the cluster: the driver, on Ray's head, is
asked to end, and this ends when the driver has, or after the time that is given. Without a driver it ends at once.
Where several pods go together each asks, beside whoever deletes the job: the driver takes that for one request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hybridflow.cluster.processes.process_tree import catches
from hybridflow.cluster.processes.termination import LEAVE

_HEAD = "node:__internal_head__"
"""Ray's own resource of the node with its head."""
_ASK_S = 30.0
_POLL_S = 0.5


def main(words: Sequence[str]) -> int:
    """The command; its exit code."""
    import ray
    from ray.exceptions import RayError

    from hybridflow.cluster.ray.ray_session import QUIET, driver_imports

    deadline = time.monotonic() + float(words[0])
    try:
        ray.init(address="auto", job_config=driver_imports(), **QUIET)
        ask: Any = ray.remote(num_cpus=0, max_retries=0, resources={_HEAD: 0.001})
        pids = ray.get(ask(stop_drivers).remote(), timeout=_ASK_S)
        print(f"the driver is to end: pid {', '.join(map(str, pids))}" if pids else "no driver", flush=True)
        while pids and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            pids = ray.get(ask(those_left).remote(pids), timeout=_ASK_S)
    except (RayError, ConnectionError, RuntimeError) as error:  # the cluster is gone already
        print(f"Ray does not answer: {error}", file=sys.stderr, flush=True)
        return 1
    return int(bool(pids))


def stop_drivers() -> list[int]:
    """Ask every driver of this host's user to end; their process ids."""
    drivers = [
        process for process in psutil.process_iter(["cmdline", "uids"]) if is_driver(process.info["cmdline"] or [])
    ]
    drivers = [process for process in drivers if process.info["uids"].real == os.getuid()]
    for process in drivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(LEAVE if catches(process.pid, LEAVE) else signal.SIGTERM)
    return [process.pid for process in drivers]


def those_left(pids: Sequence[int]) -> list[int]:
    """Processes of these that have not ended."""
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return left


def is_driver(command: Sequence[str]) -> bool:
    """True if a command line is that of `hybridflow train`."""
    if not command or not Path(command[0]).name.startswith("python"):
        return False
    words = [word for word in command[1:] if word != "-m"]
    names = [Path(word).name for word in words[:3]]
    return any(pair == ("hybridflow", "train") for pair in zip(names, words[1:4], strict=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
