"""Starts of a real Ray whose parts die or are slow."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from engine3d.errors import EngineError
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.runtime.local_ray import LocalRay

pytestmark = pytest.mark.processes

_DASHBOARD, _RUNTIME_ENVIRONMENT = "dashboard/agent.py", "runtime_env/agent/main.py"
_AGENT = """
import sys, time
if any(word.endswith({!r}) for word in sys.orig_argv):
    time.sleep({})
"""
_KILL = """
import pathlib, sys, threading
def kill():
    import psutil
    while True:
        for each in psutil.Process().children():
            if each.name() == "raylet":
                return each.kill()
if any(word.endswith("ray_node.py") for word in sys.orig_argv):
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.fixture
def local() -> Iterator[LocalRay]:
    local = LocalRay(cpus=1, object_store_bytes=2**27, limits=LimitsConfig(ray_start_s=150))
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(local.stop)
        yield local


def _delay(agent: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_AGENT.format(agent, seconds))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _attempts(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if "trying again" in line]


def test_a_raylet_that_dies_is_named_at_once_and_started_again_once(
    local: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_KILL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin = time.monotonic()
    dead = r"Ray did not start on this machine: Ray's raylet \(process \d+\) was killed by SIGKILL"
    with pytest.raises(EngineError, match=rf"^{dead} \(after \d+ s and 2 attempts; limits.ray_start_s=150\)$"):
        local.start()
    assert time.monotonic() - begin < 60
    [line] = _attempts(capfd)
    assert "was killed by SIGKILL, after" in line


@pytest.mark.parametrize("agent, seconds", [(_RUNTIME_ENVIRONMENT, 20), (_DASHBOARD, 100)])
def test_a_raylet_does_not_die_of_a_slow_agent(
    agent: str,
    seconds: float,
    local: LocalRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _delay(agent, seconds, tmp_path, monkeypatch)
    local.start()
    assert _attempts(capfd) == []
    assert ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=100) == 7
