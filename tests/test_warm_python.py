"""A process of `tests.support.warm` begins and ends as one that the interpreter runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.warm import WarmServers
from tests.support.warm.server import seen_by_imports

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is forked where there is a GPU"),
]

SEEN = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["MARK"], sys.stdin.read(), sys.executable, __name__, os.getppid()]))
print("told", file=sys.stderr)
sys.exit(3)
"""
WAITS = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of servers that have imported in the environment of these tests, whichever of them is first."""
    servers = WarmServers()
    _run(str(servers.executable), _script(tmp_path_factory.mktemp("first"), SEEN))
    yield str(servers.executable)
    servers.close()


def _script(directory: Path, source: str) -> Path:
    """A program of the kind that imports least: a cluster's head."""
    script = directory / "hybridflow" / "cluster" / "ray" / "ray_node.py"
    script.parent.mkdir(parents=True)
    script.write_text(source)
    return script


def _run(python: str, script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-P", str(script), "one", "two words"],
        cwd=script.parent,
        env={**os.environ, "MARK": "here", **environment},
        input="given",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_sees_what_it_was_given(python: str, tmp_path: Path) -> None:
    script = _script(tmp_path, SEEN)
    done = _run(python, script)
    expected = [[str(script), "one", "two words"], str(script.parent), "here", "given"]
    assert json.loads(done.stdout) == [*expected, python, "__main__", os.getpid()]
    assert (done.returncode, done.stderr) == (3, "told\n")
    # A variable that imports read: the interpreter itself runs it.
    done = _run(python, script, TORCHDYNAMO_DISABLE="0")
    assert json.loads(done.stdout) == [*expected, sys.executable, "__main__", os.getpid()]
    assert (done.returncode, done.stderr) == (3, "told\n")


def test_hosts_of_other_models_and_runs_are_forked_too() -> None:
    plain = {"SGLANG_PORT": "1", "PATH": "/bin"}
    others = {
        "SGLANG_DISABLED_MODEL_ARCHS": "llama",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_root",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/logs/nccl-timeout-rollout_",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    assert seen_by_imports("host", plain | others) == seen_by_imports("host", plain) == {"SGLANG_PORT": "1"}


def test_a_worker_of_pytest_is_forked_after_its_imports() -> None:
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) < 3:  # set after the server has imported this module
        pytest.skip("not one of more than two workers")
    parent = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{parent}/cmdline").read_text().split("\0")[1:4] == ["-m", "tests.support.warm.server", "worker"]


@pytest.mark.parametrize("first", ["launcher", "forked"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_and_its_launcher_end_together(
    first: str, number: signal.Signals, python: str, tmp_path: Path
) -> None:
    script = _script(tmp_path, WAITS)
    launcher = subprocess.Popen([python, "-P", str(script)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    forked = psutil.Process(int(launcher.stdout.readline()))
    assert forked.pid != launcher.pid
    os.kill(launcher.pid if first == "launcher" else forked.pid, number)
    assert launcher.wait(60) == -number
    forked.wait(60)
    assert not forked.is_running()


@pytest.mark.parametrize("sent", ["nothing", "size", "request", "refused"])
def test_a_launcher_that_is_killed_early_takes_no_server_with_it(sent: str, python: str, tmp_path: Path) -> None:
    script = _script(tmp_path, SEEN)
    environment = dict(os.environ) | ({"TORCHDYNAMO_DISABLE": "0"} if sent == "refused" else {})
    request = {
        "arguments": [str(tmp_path / "missing.py")],
        "environment": environment,
        "directory": str(tmp_path),
        "descriptors": [0],
        "launcher": os.getpid(),
        "leads": False,
        "umask": 0o022,
    }
    data = json.dumps(request).encode()
    with (tmp_path / "empty").open("w") as file, socket.socket(socket.AF_UNIX) as server:
        server.connect(str(Path(python).with_name("head")))
        if sent != "nothing":
            socket.send_fds(server, [len(data).to_bytes(4, "little")], [file.fileno()])
        if sent in ("request", "refused"):
            server.sendall(data)
    done = _run(python, script)
    assert (done.returncode, done.stderr) == (3, "told\n")
    assert json.loads(done.stdout)[4] == python  # it was forked
