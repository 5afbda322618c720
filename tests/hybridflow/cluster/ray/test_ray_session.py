"""Starts of a real Ray whose parts die or are slow, each in a process of its own: one process knows one Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.processes

_START = """
import hybridflow, ray
from engine3d.errors import EngineError
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray.ray_session import RaySession
local = RaySession(cpus=1, limits=LimitsConfig(ray_start_s=150))
try:
    local.start()
    print(ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=100))
except EngineError as error:
    print(error)
finally:
    local.stop()
"""
_SLOW_AGENTS = """
import sys, time
for agent, seconds in (("runtime_env/agent/main.py", 20), ("dashboard/agent.py", 100)):
    if any(word.endswith(agent) for word in sys.orig_argv):
        time.sleep(seconds)
"""
_KILL = """
import pathlib, sys, threading, time
def kill():
    while time.sleep(0.01) is None:
        for each in psutil.Process().children(recursive=True):
            if each.name() == "raylet":
                return each.kill()
if any(word.endswith("ray_node.py") for word in sys.orig_argv):
    import psutil
    threading.Thread(target=kill, daemon=True).start()
"""


def _start(site: str, tmp_path: Path) -> tuple[str, list[str]]:
    """The last line that a process which starts Ray prints, and what it says of further attempts.

    Args:
        site: code that each of its processes begins with.
    """
    (tmp_path / "sitecustomize.py").write_text(site)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-c", _START]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=500, check=True
    )
    return done.stdout.splitlines()[-1], [line for line in done.stderr.splitlines() if "trying again" in line]


def test_a_raylet_that_dies_is_named_at_once_and_started_again_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    outcome, attempts = _start(_KILL, tmp_path)
    dead, _, process = outcome.partition(" (process ")
    assert dead == "Ray did not start on this machine: Ray's raylet"
    assert re.fullmatch(r"\d+\) was killed by SIGKILL \(after \d+ s and 2 attempts; limits.ray_start_s=150\)", process)
    assert time.monotonic() - begin < 150
    [line] = attempts
    assert "was killed by SIGKILL, after" in line


def test_a_raylet_does_not_die_of_slow_agents(tmp_path: Path) -> None:
    assert _start(_SLOW_AGENTS, tmp_path) == ("7", [])


_ENDED_BY_RAY = """
import os, pathlib, signal, sys, time
import psutil
from hybridflow.cluster.processes.termination import termination
from hybridflow.cluster.ray.ray_session import RaySession

class Ended(RaySession):
    def _keep(self, line):
        super()._keep(line)
        os.kill(os.getpid(), signal.SIGKILL)  # as Ray's own code may at any moment

with termination.handled():
    termination.begin()
    with Ended(cpus=1, run=pathlib.Path(sys.argv[1])):
        next(each for each in psutil.Process().children(recursive=True) if each.name() == "raylet").kill()
        time.sleep(100)
"""


def test_a_driver_that_ray_ends_before_it_has_spoken_leaves_the_cause_on_the_console(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDED_BY_RAY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == -9, done.stderr
    said, title, cause = done.stderr.splitlines()[:3]
    [pid] = re.findall(r"^  cause      Ray's raylet \(process (\d+)\) was killed by SIGKILL, and the run cannot", cause)
    ended = f"Ray's raylet (process {pid}) died, and the run ended without a word: by Ray, or both were killed"
    assert (said, title) == (f"hybridflow: {ended}", "hybridflow: first failure")


_AFTER_THE_END = """
import hybridflow, ray
from ray.exceptions import RayError
from engine3d.errors import UserError
from hybridflow.cluster.ray.ray_session import start_ray
try:
    ray.put(1)
except RayError as error:
    print(type(error).__name__)
ray.is_initialized = lambda: True
try:
    start_ray()
except UserError as error:
    print(error)
"""


def test_a_call_without_ray_starts_none_and_a_ray_of_the_program_is_left_alone(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_AUTO_CONNECT"}
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_THE_END],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    refused = "Ray is running in this process, as by ray.init(), expected it to be shut down"
    assert done.stdout.splitlines() == ["RaySystemError", refused]


_WITHOUT_HOLDER = """
import time
import psutil
from engine3d.errors import EngineError
from hybridflow.cluster.ray.ray_session import RaySession

session = RaySession(cpus=1)
session.start()
next(child for child in psutil.Process().children() if child.cmdline()[-1].endswith("ray_node.py")).kill()
while session.is_complete:
    time.sleep(0.05)
try:
    session.check()
except EngineError as error:
    print(error)
session.stop()
"""


def test_the_holder_of_servers_is_missed_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HOLDER],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert re.fullmatch(r"the holder of Ray's servers \(process \d+\) is gone, and the run cannot.*\n", done.stdout), (
        done
    )
