"""A run on hosts: started on every one of them, followed by its files, and looked at when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.hosts.cluster import Hosts
from tests.support.runs import DEMO, ROOT, SMALL, records

PORT = 29400
LIMIT_S = 240.0
_LEFT_BY_LIBRARIES = ("/tmp/torchinductor_", "/tmp/torchelastic_")
"""The second is torchrun's own, of empty directories."""


_LEARNED = re.compile(r"(train|reward|mismatch|eval)/(?!.*(_ms|_per_sec)$).*")
"""What a run's metrics say of what it learns; the rest is times, bytes and memory."""


@dataclass
class Launch:
    """A run that goes on, or has ended.

    Args:
        hosts: on which it runs.
        directory: that all hosts see.
        processes: what was started on each.
        own: directory of runs that each host has for itself; None where runs are in `directory`.
    """

    hosts: Hosts
    directory: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    own: Path | None = None

    @property
    def run(self) -> Path:
        """The run's directory, on host 0."""
        return self.directory / "small" if self.own is None else self.run_on(0)

    def run_on(self, host: int) -> Path:
        """The run's directory on a host's own disk, as this process finds it."""
        assert self.own is not None
        return self.hosts[host].path(self.own) / "small"

    def output(self, host: int) -> str:
        """What a host's launcher has printed so far, both streams."""
        return (self.directory / f"output-{host}").read_text()

    def phase(self) -> dict[str, Any]:
        """What the run is at: `step` and `phase`; empty before it has begun."""
        try:
            return dict(json.loads((self.run / "phase.json").read_text()))
        except (OSError, ValueError):
            return {}

    def until(self, reached: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for something while every process goes on."""
        deadline = time.monotonic() + limit_s
        while not reached():
            assert time.monotonic() < deadline, self.outputs()
            assert all(process.poll() is None for process in self.processes), self.outputs()
            time.sleep(0.05)

    def until_in(self, phase: str, step: int = 2) -> None:
        """Wait until the run is in a phase of a step, or of a later one."""
        self.until(lambda: self.phase().get("phase") == phase and self.phase()["step"] >= step)

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Exit codes of all launchers, once they have ended."""
        deadline = time.monotonic() + limit_s
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {limit_s:g} s:\n{self.outputs()}") from None

    def outputs(self) -> str:
        """What all hosts have printed, for a failed test."""
        return "\n".join(f"--- host {index}\n{self.output(index)[-3000:]}" for index in range(len(self.hosts)))

    def pids(self, host: int, words: str, limit_s: float = 10.0) -> list[int]:
        """Processes of a host whose command holds some words, as the host counts them."""
        deadline = time.monotonic() + limit_s
        while not (found := [each.pid for each in self.hosts[host].processes() if words in each.command]):
            assert time.monotonic() < deadline, self.hosts[host].processes()
            time.sleep(0.05)
        return found

    def logs_to(self, host: int, log: str) -> bool:
        """Whether a process of a host writes the log of a rank."""
        return bool(self.writers(host, log))

    def kill_rank(self, host: int, log: str) -> None:
        """Kill the processes of a host that write the log of a rank."""
        for pid in (found := self.writers(host, log)):
            self.hosts[host].run(["kill", "-KILL", str(pid)])
        assert found

    def writers(self, host: int, log: str) -> list[int]:
        """Processes of a host that write the log of a rank, as the host counts them."""
        found, processes = [], self.hosts[host].path("/proc")
        for each in self.hosts[host].processes():
            with contextlib.suppress(OSError):
                if (processes / str(each.pid) / "fd/1").readlink().name == f"{log}.log":
                    found.append(each.pid)
        return found

    def left(self, limit_s: float = 10.0) -> list[str]:
        """What is left on the hosts that are up, once nothing more goes."""
        deadline = time.monotonic() + limit_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    @property
    def _may_stay(self) -> tuple[str, ...]:
        return (*_LEFT_BY_LIBRARIES, *([f"{self.own}/"] if self.own is not None else []))

    def _left(self) -> list[str]:
        return [
            f"{host.name}: {each}"
            for host in self.hosts
            if host.is_up
            for each in (
                *(process.command for process in host.processes()),
                *(path for path in map(str, host.left_files()) if not path.startswith(self._may_stay)),
            )
        ]


def small_run(directory: Path, *overrides: str) -> list[str]:
    """The demo's recipe, made small, in a directory: what a launcher is given."""
    return [DEMO, f"run_dir={directory}", *SMALL, *overrides]


def environment(directory: Path, **changes: str) -> dict[str, str]:
    """What a user's shell on a host has: no more than the environment's programs, and the run's token."""
    token = directory / "token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "HOME": str(directory), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return given | {"HYBRIDFLOW_TOKEN_FILE": str(token)} | changes


def start(
    hosts: Hosts,
    directory: Path,
    command: Callable[[int], Sequence[str]],
    environments: Callable[[int], dict[str, str]] | None = None,
) -> Launch:
    """Start something on every host.

    Args:
        hosts: all of them.
        directory: that all see, for what they print.
        command: of each host.
        environments: of each host; `environment(directory)` if None.
    """
    launch = Launch(hosts, directory)
    for index, host in enumerate(hosts):
        with (directory / f"output-{index}").open("w") as output:
            launch.processes.append(
                host.start(
                    command(index),
                    env=environments(index) if environments is not None else environment(directory),
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return launch


def agent_command(
    index: int,
    hosts: int,
    *words: str,
    head: str = f"host-0:{PORT}",
    slots: int = 4,
    role: str | None = None,
    restarts: int = 0,
    spares: int = 0,
) -> list[str]:
    """`hybridflow agent` as a launcher runs it on a host."""
    options = ["--host", str(index), "--hosts", str(hosts), "--head", head, "--cpu-slots", str(slots)]
    options += ["--role", role] if role is not None else []
    options += ["--max-restarts", str(restarts)] if restarts else []
    options += ["--spares", str(spares)] if spares else []
    return [sys.executable, "-m", "hybridflow", "agent", *options, "train", *words]


def start_agents(hosts: Hosts, directory: Path, *overrides: str, own: Path | None = None) -> Launch:
    """Start an agent on every host, of the small run with some settings.

    Args:
        hosts: all of them.
        directory: that all see.
        overrides: settings.
        own: directory of runs that each host has for itself; `directory` if None.
    """
    words = small_run(own or directory, *overrides)
    launch = start(hosts, directory, lambda index: agent_command(index, len(hosts), *words))
    launch.own = own
    return launch


def learned(directory: Path) -> list[dict[str, float]]:
    """Of every record of a run, what it learned."""
    return [
        {name: value for name, value in record.items() if _LEARNED.fullmatch(name)}
        for record in records(directory, "train", "warmup", "eval")
    ]
