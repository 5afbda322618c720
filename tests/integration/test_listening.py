"""Access to a run from outside: listeners, permissions of its directory, and the code that its ranks import."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.ray.ray_session import driver_imports, start_ray
from tests.support.listening import Listener, listeners
from tests.support.runs import command

pytestmark = pytest.mark.processes

# Ranks and engines apart, several of each, and weights between them over a process group: every store and every
# process group that a run can have.
APART = [
    "warmup=null",
    "trainer.steps=8",
    "placement.rollout=cpu:2-3",
    "rollout.engine.tp=2",
    "rollout.weights.transport=collective",
    "checkpoint.save_interval=1",
]
OURS = ("hf-ray-", "new-hf-ray-", "engine3d-rollout-", "new-engine3d-rollout-")
PLANTED = "raise SystemExit('imported from the working directory')\n"


def phase_of(run: Path) -> str | None:
    try:
        return str(json.loads((run / "phase.json").read_text())["phase"])
    except (OSError, ValueError):
        return None


@pytest.mark.long
def test_a_run_on_one_host_listens_on_loopback_alone_in_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, temporary = tmp_path / "working", Path(f"/tmp/hf-test-{os.getpid()}")
    for directory in (working, temporary, working / "torch"):
        directory.mkdir()
    for name in ("xxhash.py", "hybridflow.py", "sglang.py", "torch/__init__.py", "json.py"):
        (working / name).write_text(PLANTED)
    monkeypatch.setenv("TMPDIR", str(temporary))
    program, *arguments = command(tmp_path, *APART)
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [program, "-P", *arguments], cwd=working, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    by_phase: dict[str | None, set[Listener]] = {}
    modes: set[int] = set()
    deadline = time.monotonic() + 400
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, output.read_text()
            by_phase.setdefault(phase_of(tmp_path / "small"), set()).update(listeners(process.pid))
            for path in temporary.glob("hf-ray-*"):
                with contextlib.suppress(FileNotFoundError):
                    modes.add(path.stat().st_mode)
            time.sleep(0.1)
        left = [path for path in temporary.iterdir() if path.name.startswith(OURS)]  # torch keeps caches there
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(temporary)
    assert process.returncode == 0, output.read_text()
    # Phases of a step are short: on a busy machine not each of them is met, and sockets outlive them.
    phases = by_phase.keys() - {None, "end"}
    assert "start" in phases and len(phases) >= 3 and all(by_phase[phase] for phase in phases)
    assert not {listener for phase in by_phase.values() for listener in phase if not listener.only_this_host}
    engines = {listener for phase in by_phase.values() for listener in phase if "sglang::scheduler" in listener.process}
    assert engines  # they were seen at all: the process group of an engine's own ranks
    assert modes == {stat.S_IFDIR | 0o700}
    assert not left
    assert "working directory" not in "".join(path.read_text() for path in (tmp_path / "small/logs").iterdir())


def test_authentication_that_is_switched_off_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "Disabled")
    for address in (None, "10.0.0.1:6379"):
        with pytest.raises(UserError) as caught:
            start_ray(address=address)
        assert str(caught.value) == (
            "RAY_AUTH_MODE=Disabled in the environment: whoever reaches Ray's ports could run code as this user; unset "
            "it, or set RAY_AUTH_MODE=token"
        )


ASKS = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", timeout=20)
except Exception as error:
    print("refused", type(error).__name__)
else:
    print("let in")
"""


def test_ray_lets_nobody_in_without_the_runs_token(ray_cluster: None) -> None:
    import ray

    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    address = ray.get_runtime_context().gcs_address
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASKS, address],
            env=bare | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": secret},
            stdout=subprocess.PIPE,
            text=True,
        )
        for mode, secret in (("token", token.read_text()), ("token", "0" * 64), ("disabled", ""))
    ]
    answers = [process.communicate(timeout=90)[0].strip() for process in asking]
    assert answers[0] == "let in"
    assert all(answer.startswith("refused") for answer in answers[1:]), answers


def test_workers_import_from_where_the_driver_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/driver/first", "/driver/second"])
    paths = driver_imports()._py_driver_sys_path
    paths.extend([str(tmp_path)])  # as Ray does
    assert list(reversed(paths)) == sys.path  # a worker puts one after another in front
    monkeypatch.setattr(sys, "path", ["", "/driver"])  # an interpreter that was started without a script
    assert list(reversed(driver_imports()._py_driver_sys_path)) == [str(tmp_path), "/driver"]
