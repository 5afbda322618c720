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
from tests.support.warm import warm_python
from tests.support.warm.launcher import COLD
from tests.support.warm.server import seen_by_imports

PORT = 29400
LIMIT_S = 600.0
_LEFT_BY_LIBRARIES = ("/tmp/torchinductor_", "/tmp/torchelastic_")
"""The second is torchrun's own, of empty directories."""


_LEARNED = re.compile(r"(train|reward|mismatch|eval)/(?!.*(_ms|_per_sec)$).*")
"""Metrics of learning; the rest is times, bytes and memory."""


@dataclass
class Launch:
    """A run that goes on, or has ended.

    Args:
        hosts: on which it runs.
        directory: that all hosts see.
        processes: what was started on each.
        own_dir: directory of runs that each host has for itself; None where runs are in `directory`.
    """

    hosts: Hosts
    directory: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    own_dir: Path | None = None

    @property
    def run(self) -> Path:
        """The run's directory, on host 0."""
        return self.directory / "small" if self.own_dir is None else self.run_on(0)

    def run_on(self, host: int) -> Path:
        """The run's directory on a host's own disk, as this process finds it."""
        assert self.own_dir is not None
        return self.hosts[host].path(self.own_dir) / "small"

    def output(self, host: int) -> str:
        """Output of a host's launcher so far, both streams."""
        return (self.directory / f"output-{host}").read_text()

    def phase(self) -> dict[str, Any]:
        """Position of the run: `step` and `phase`; empty before it has begun."""
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
        """Output of all hosts, for a failed test."""
        return "\n".join(f"--- host {index}\n{self.output(index)[-3000:]}" for index in range(len(self.hosts)))

    def pids(self, host: int, words: str, limit_s: float = LIMIT_S) -> list[int]:
        """Processes of a host whose command holds some words, as the host counts them."""
        deadline = time.monotonic() + limit_s
        while not (results := [process.pid for process in self.hosts[host].processes() if words in process.command]):
            assert time.monotonic() < deadline, self.hosts[host].processes()
            time.sleep(0.05)
        return results

    def logs_to(self, host: int, log: str) -> bool:
        """True if a process of a host writes the log of a rank."""
        return bool(self.writers(host, log))

    def kill_rank(self, host: int, log: str) -> None:
        """Kill the processes of a host that write the log of a rank."""
        for pid in (results := self.writers(host, log)):
            self.hosts[host].run(["kill", "-KILL", str(pid)])
        assert results

    def writers(self, host: int, log: str) -> list[int]:
        """Processes of a host that write the log of a rank, as the host counts them."""
        results, processes = [], self.hosts[host].path("/proc")
        for process in self.hosts[host].processes():
            with contextlib.suppress(OSError):
                if (processes / str(process.pid) / "fd/1").readlink().name == f"{log}.log":
                    results.append(process.pid)
        return results

    def left(self, limit_s: float = 120.0) -> list[str]:
        """Processes and files left on the hosts that are up, once nothing more goes."""
        deadline = time.monotonic() + limit_s
        while (results := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return results

    @property
    def _may_stay(self) -> tuple[str, ...]:
        return (*_LEFT_BY_LIBRARIES, *([f"{self.own_dir}/"] if self.own_dir is not None else []))

    def _left(self) -> list[str]:
        return [
            f"{host.name}: {item}"
            for host in self.hosts
            if host.is_up
            for item in (
                *(process.command for process in host.processes()),
                *(path for path in map(str, host.left_files()) if not path.startswith(self._may_stay)),
            )
        ]


def small_run(directory: Path, *overrides: str) -> list[str]:
    """The demo's recipe, made small, in a directory: what a launcher is given."""
    return [DEMO, f"run_dir={directory}", *SMALL, *overrides]


def environment(directory: Path, **changes: str) -> dict[str, str]:
    """Environment of a user's shell on a host: no more than the environment's programs, and the run's token."""
    token = directory / "token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": path, "HOME": str(directory), "PYTHONPATH": str(ROOT)}
    given |= seen_by_imports("driver", dict(os.environ))
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
    python: str | None = None,
) -> list[str]:
    """`hybridflow agent` as a launcher runs it on a host, by an interpreter or by that of `tests.support.warm`."""
    options = ["--host", str(index), "--hosts", str(hosts), "--head", head, "--cpu-slots", str(slots)]
    options += ["--role", role] if role is not None else []
    options += ["--max-restarts", str(restarts)] if restarts else []
    options += ["--spares", str(spares)] if spares else []
    return [python or warm_python(), "-m", "hybridflow", "agent", *options, "train", *words]


def start_agents(hosts: Hosts, directory: Path, *overrides: str, own_dir: Path | None = None, cold: str = "") -> Launch:
    """Start an agent on every host, of the small run with some settings.

    Args:
        hosts: all of them.
        directory: that all see.
        overrides: settings.
        own_dir: directory of runs that each host has for itself; `directory` if None.
        cold: kind of process of `tests.support.warm` that is not forked, and so a child of the one that starts it.
    """
    words = small_run(own_dir or directory, *overrides)
    given = environment(directory, **{COLD: cold})
    launch = start(hosts, directory, lambda index: agent_command(index, len(hosts), *words), lambda _: given)
    launch.own_dir = own_dir
    return launch


def learned(directory: Path) -> list[dict[str, float]]:
    """Metrics of learning of every record of a run."""
    return [
        {name: value for name, value in record.items() if _LEARNED.fullmatch(name)}
        for record in records(directory, "train", "warmup", "eval")
    ]
