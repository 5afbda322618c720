"""A run on several hosts, started by torchrun: one agent a host, the first host runs the driver.

    torchrun --nnodes N --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        launch/torchrun.py RECIPE [key=value ...]

The same command on every host, and on every host the run's token (`hybridflow token`). With more than one process a
host, the first is the agent and the others stand by until it ends. Options of `hybridflow agent` (--interface, --role,
--cpu-slots, --max-restarts, --spares) stand before the recipe; `docs/multi_node.md` has the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from engine3d.errors import UserError
from hybridflow.cli.agent import take_part
from hybridflow.cluster.devices.device_map import ROLES
from hybridflow.cluster.hosts.agent import Assignment
from hybridflow.cluster.hosts.launch_plan import LaunchPlan

_NEEDED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORT, _DONE = "hybridflow/port", "hybridflow/done"
_WITHIN = timedelta(minutes=10)
_LOOK_EVERY_S = 1.0
_PARENT_POLL_S = 1.0


def main() -> int:
    """Take part as this process's place in torchrun's environment says; the exit code."""
    parser = argparse.ArgumentParser(prog="launch/torchrun.py", description="A run on the hosts that torchrun starts.")
    parser.add_argument("--interface", metavar="NAME", help="network interface of the cluster on this host")
    parser.add_argument("--role", choices=ROLES, help="what this host is for; anything if not said")
    parser.add_argument("--cpu-slots", type=int, metavar="N", help="CPU slots of this host (one a core)")
    # torchrun has an option of this name too, which starts the agents again.
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="starts after failures, with resume=auto (0)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="the last N hosts stand by, each for one that is lost (0)"
    )
    parser.add_argument("--doctor", action="store_true", help="only look at the hosts, and say what is wrong")
    parser.add_argument("recipe", metavar="RECIPE", help="the same file on every host")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for hybridflow train")
    given = parser.parse_intermixed_args()
    try:
        return _take_part(given)
    except UserError as error:
        print("\n".join(f"hybridflow: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        return 2


def _take_part(given: argparse.Namespace) -> int:
    if missing := [name for name in _NEEDED if name not in os.environ]:
        raise UserError(f"launch/torchrun.py is for torchrun, which sets {', '.join(missing)}; see its --help")
    host, hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    store = _Store(host)
    if int(os.environ["LOCAL_RANK"]) != 0:
        _when_orphaned(lambda: os._exit(128 + signal.SIGTERM))
        store.wait_until_done()
        return 0
    _when_orphaned(lambda: os.kill(os.getpid(), signal.SIGTERM))
    port = 0 if host == 0 or hosts == 1 else store.port()
    assignment = Assignment(
        host, os.environ["MASTER_ADDR"], port, interface=given.interface, role=given.role, cpu_slots=given.cpu_slots
    )
    words = ["doctor" if given.doctor else "train", given.recipe, *given.overrides]
    plan = LaunchPlan(hosts, words, restarts=given.max_restarts, spares=given.spares)
    code = take_part(assignment, plan, announce=store.announce)
    store.done()
    return code


def _when_orphaned(call: Callable[[], object]) -> None:
    """Call `call` in another thread when torchrun is gone, which ends its processes unless it is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        call()

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Say of a store that is gone, or does not answer, where the cause stands."""
    try:
        yield
    except RuntimeError:
        where, within = os.environ["MASTER_ADDR"], _WITHIN.total_seconds() / 60
        raise UserError(
            f"host 0 ({where}) has ended, or does not listen within {within:g} minutes: its own output says why"
        ) from None


class _Store:
    """torchrun's own store, by which the hosts find host 0's port; it holds no secret, as it lets everybody in.

    Args:
        host: number of this host.
    """

    def __init__(self, host: int) -> None:
        from torch.distributed.rendezvous import rendezvous

        with _reaching():
            self._store, _, _ = next(rendezvous("env://", timeout=_WITHIN))
        self._done = f"{_DONE}/{host}"

    def announce(self, port: int) -> None:
        """Say where host 0 listens."""
        self._store.set(_PORT, str(port))

    def port(self) -> int:
        """Port of host 0, once it listens. Raises UserError if it ends before, or does not in ten minutes."""
        with _reaching():
            return int(self._store.get(_PORT))

    def done(self) -> None:
        """End the other processes of this host too."""
        with contextlib.suppress(Exception):  # the store's process may be gone
            self._store.set(self._done, "1")

    def wait_until_done(self) -> None:
        """Wait until this host's agent has ended."""
        with contextlib.suppress(RuntimeError):  # a store that is gone
            while not self._store.check([self._done]):  # a wait with a limit warns each time
                time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
