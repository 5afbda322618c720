"""The processes of a group's ranks: which there are, what they died of, and their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.processes.process_tree import kill_trees
from hybridflow.cluster.processes.rank_look import RankPlace
from hybridflow.cluster.ray import ray_session
from hybridflow.workers.failure_diagnosis import RankError, RankUserError
from hybridflow.workers.watching.call_progress import ProgressLimits


class Ranks:
    """The ranks of a role: one Ray actor each.

    Args:
        role: names them in errors and log files.
        devices: on which they compute.
        log_dir: each rank's output goes to `<log_dir>/<role>-<rank>.log`; to Ray's own logs if None.
        quiet_s: seconds without an answer, after which a line on stderr names the awaited ranks.
        progress: limits of a call without progress; None for no limit.
        call_timeout_s: limit of every call whose method or caller has no other, in seconds.
        ending: is called once they are to end, before they are killed.
        memory_methods: limits in seconds of `offload` and `onload` (`device_turns`), of those that the worker has.
    """

    def __init__(
        self,
        role: str,
        devices: frozenset[Device],
        log_dir: Path | None,
        *,
        quiet_s: float,
        call_timeout_s: float,
        progress: ProgressLimits | None = None,
        ending: Callable[[Ranks], None],
        memory_methods: Mapping[str, float] | None = None,
    ) -> None:
        self.role, self.devices = role, devices
        self.log_dir = log_dir.resolve() if log_dir else None
        self.quiet_s, self.call_timeout_s, self.progress = quiet_s, call_timeout_s, progress
        self._ending = ending
        self.memory_methods = dict(memory_methods or {})
        self.actors: list[Any] = []  # of ActorHandle[RankProcess], which Ray makes without types
        self.processes: list[psutil.Process] = []
        """Processes of the ranks on this machine."""
        self.locations: list[RankPlace] = []
        """Location of each rank, once all have reported it."""
        self.failure: RankError | RankUserError | None = None
        """Error that they died of."""

    @property
    def is_alive(self) -> bool:
        """True if there are processes."""
        return bool(self.actors)

    @property
    def nodes(self) -> list[str]:
        """Ray's id of the node that each rank runs on."""
        return [location.node for location in self.locations]

    def log_path(self, rank: int) -> Path | None:
        """Return the log file of a rank."""
        return self.log_dir / f"{self.role}-{rank}.log" if self.log_dir else None

    def check(self, method: str) -> None:
        """Raise what they died of, or EngineError if they were shut down before `method` answered."""
        if self.failure is not None:
            raise self.failure
        if not self.actors:
            raise EngineError(f"{self.role}.{method}: the group was shut down before it answered")

    def fail(self, error: RankError | RankUserError) -> None:
        """End them; every later call raises the error."""
        if self.failure is None:  # the first is the cause of others
            self.failure = error
        self.kill()

    def kill(self) -> None:
        """End every process now."""
        self._ending(self)
        actors, self.actors = self.actors, []
        if ray_session.ray_answers():
            for actor in actors:
                ray.kill(actor)
        processes, self.processes = self.processes, []
        with cleaning(f"hybridflow: {self.role}"):
            kill_trees(processes)
