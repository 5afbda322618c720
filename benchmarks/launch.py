"""Duration of a launch's beginning, and of its end after a failure.

    python benchmarks/launch.py --agents 64 512 --directory runs/launch            agents that only report
    python benchmarks/launch.py --hosts --directory runs/launch                    the small run of the tests on 3 hosts

The agents and the supervisor are the real ones; hosts are addresses of the loopback interface, and their agents share a
few processes, so that this machine can hold them: without Ray, and so without what its actors compare and measure. The
3 hosts are network namespaces (root on Linux) and run everything. Prints a table, and
last one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launch_agents import Specification, address

ROOT = Path(__file__).resolve().parents[1]
_IDLE_S = 5.0
_LIMIT_S = 600.0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="launch.py", description="Seconds from launch to run, and from failure to end."
    )
    parser.add_argument("--agents", type=int, nargs="*", default=[], metavar="N", help="launches of so many agents")
    parser.add_argument("--processes", type=int, default=4, help="that share the agents beside the first one's")
    parser.add_argument("--hosts", action="store_true", help="three hosts, the small run of the tests")
    parser.add_argument("--directory", type=Path, default=Path("runs/launch"), help="to be made")
    options = parser.parse_args()
    directory = options.directory.absolute()
    if directory.exists():
        parser.error(f"--directory: {directory} exists already, expected a new directory")
    directory.mkdir(parents=True)
    results: dict[str, Any] = {"machine": _machine(), "versions": _versions(), "launches": [], "hosts": []}
    for agents in options.agents:
        for failure in ("fail", "lost"):
            measured = measure_agents(
                directory / f"{agents}-{failure}",
                agents,
                failure,
                processes=options.processes,
            )
            results["launches"].append(measured)
            print(_line(measured), flush=True)
    if options.hosts:
        for failure in ("rank killed", "agent killed", "link down"):
            measured = measure_hosts(directory / failure.replace(" ", "-"), failure)
            results["hosts"].append(measured)
            print(_line(measured), flush=True)
    print(json.dumps(results, indent=1))
    return 0


def measure_agents(
    directory: Path,
    agents: int,
    failure: str,
    *,
    processes: int = 4,
    idle_s: float = _IDLE_S,
) -> dict[str, Any]:
    """One launch of agents that only report, which ends of a failure.

    Args:
        directory: to be made.
        agents: how many, the first one in a process of its own.
        failure: "fail", of the command, or "lost", of the last agents' connection.
        processes: that share the others.
        idle_s: for which the launch goes on before.

    Returns:
        Seconds, CPU seconds and bytes; the supervisor's are those of the process of the first agent.

    Raises:
        RuntimeError: an agent did not end as it should.
    """
    directory.mkdir(parents=True)
    load = os.getloadavg()[0]
    events = directory / "events"
    command = [sys.executable, "-P", str(ROOT / "benchmarks/launch_command.py"), str(events), failure, str(idle_s)]
    with socket.socket() as free:
        free.bind((address(0), 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(32)
    started = []
    for first, count in _shares(agents, processes):
        given = Specification(first, count, agents, port, token, str(directory), ["train", *command])
        started.append(_start(given, directory / f"agents-{first}.log"))
    for process in started:
        if _read(process) != "ready":
            raise RuntimeError(f"agents did not start: see {directory}")
    go = time.time()
    for process in started:
        _write(process, "go")
    supervisor = psutil.Process(started[0].pid)
    begun = _event(events, "started", supervisor)
    cpu = _cpu_s(supervisor)
    memory = supervisor.memory_info().rss
    time.sleep(idle_s * 0.8)
    idle_cpu = _cpu_s(supervisor) - cpu
    if failure == "lost":
        lost = time.time()
        _write(started[-1], "lose")
    failed = _event(events, "failed", supervisor)
    reports = [json.loads(_read(process)) for process in started]
    for process in started:
        process.wait(_LIMIT_S)
    codes = [code for report in reports for code in report["codes"]]
    if set(codes) != {1} or len(codes) != agents:
        raise RuntimeError(f"{agents} agents ended with {sorted(set(codes))}, expected 1 of all: see {directory}")
    said = (directory / "agents-0.log").read_text()
    ended = max(report["ended"] for report in reports)
    return {
        "agents": agents,
        "failure": failure,
        "processes": len(started),
        "load_before": load,
        "seconds_until_all_are_there": float(_matched(rf"{agents} hosts after ([\d.]+) s", said)),
        "seconds_until_command": round(begun - go, 2),
        "seconds_from_failure_to_exit_of_all": round(ended - (lost if failure == "lost" else failed), 2),
        "supervisor_cpu_s_until_command": round(cpu, 2),
        "supervisor_cpu_share_while_it_runs": round(idle_cpu / (idle_s * 0.8), 3),
        "supervisor_cpu_s": round(reports[0]["cpu_s"], 2),
        "supervisor_bytes_while_it_runs": memory,
        "supervisor_peak_bytes": reports[0]["peak_bytes"],
        "all_cpu_s": round(sum(report["cpu_s"] for report in reports), 2),
    }


def measure_hosts(directory: Path, failure: str) -> dict[str, Any]:
    """The small run of the tests on three hosts, which ends of a failure on the second one."""
    from tests.support.hosts import make_hosts
    from tests.support.hosts.launching import start_agents

    settings = ["warmup=null", "trainer.steps=1000", "evaluation.eval.before_train=false"]
    settings += ["placement.actor=cpu:0-1", "placement.rollout=cpu:4,8"]
    directory.mkdir(parents=True)
    load = os.getloadavg()[0]
    with make_hosts(3, shared=directory) as hosts:
        began = time.monotonic()
        launch = start_agents(hosts, directory, *settings)
        launch.until(lambda: "hosts: checked in" in launch.output(0), _LIMIT_S)
        checked = time.monotonic() - began
        launch.until_in("rollout", 1)
        first = time.monotonic() - began
        launch.until_in("rollout", 3)
        failed = time.monotonic()
        if failure == "rank killed":
            launch.kill_rank(1, "rollout-0")
        elif failure == "agent killed":
            launch.processes[1].kill()
        else:
            hosts[1].link_down()
        launch.wait(_LIMIT_S)
        ended = time.monotonic() - failed
        left = launch.left()
    said = (directory / "output-0").read_text()
    return {
        "hosts": 3,
        "seconds_of_checks": float(_matched(r"hosts: checked in ([\d.]+) s", said)),
        "failure": failure,
        "load_before": load,
        "seconds_until_checked": round(checked, 1),
        "seconds_until_first_step": round(first, 1),
        "seconds_from_failure_to_exit_of_all": round(ended, 1),
        "left_over": left,
    }


def _shares(agents: int, processes: int) -> list[tuple[int, int]]:
    """First agent and number of agents of each process."""
    others = agents - 1
    count = min(processes, others)
    ends = [1 + others * process // count for process in range(count + 1)]
    return [(0, 1), *((first, end - first) for first, end in itertools.pairwise(ends))]


def _start(given: Specification, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "benchmarks/launch_agents.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | {"HYBRIDFLOW_LOG_LEVEL": "info"},
        )
    _write(process, json.dumps(asdict(given)))
    return process


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _event(events: Path, name: str, supervisor: psutil.Process) -> float:
    """Return the time of an event of the command, once it has happened; RuntimeError if the launch is over before."""
    while supervisor.is_running() and supervisor.status() != psutil.STATUS_ZOMBIE:
        if events.exists() and (there := re.search(rf"^{name} ([\d.]+)$", events.read_text(), re.MULTILINE)):
            return float(there[1])
        time.sleep(0.02)
    raise RuntimeError(f"the launch ended before the command has {name}: see {events.parent}")


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def _matched(pattern: str, text: str) -> str:
    there = re.search(pattern, text)
    if there is None:
        raise RuntimeError(f"no {pattern!r} in what was said: {text[-2000:]}")
    return there[1]


def _line(measured: dict[str, Any]) -> str:
    what = f"{measured['agents']} agents" if "agents" in measured else f"{measured['hosts']} hosts"
    stats = {name: value for name, value in measured.items() if name.startswith(("seconds", "supervisor", "load"))}
    shown = "  ".join(f"{name} {value:,}" for name, value in stats.items())
    return f"{what}, {measured['failure']}:  {shown}"


def _machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "ray": version("ray"), "torch": version("torch")}


if __name__ == "__main__":
    sys.exit(main())
