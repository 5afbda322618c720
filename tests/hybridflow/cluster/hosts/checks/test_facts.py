"""Facts of this machine; several hosts are in tests/integration/hosts/test_doctor_parts.py."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.gpu_availability import InUse
from hybridflow.cluster.hosts.checks.facts import (
    Needs,
    code_hash,
    collect,
    file_system,
    lacks,
    mark_directory,
    recipe_hash,
    sees_mark,
)
from hybridflow.cluster.hosts.checks.facts import _checkout as checkout

ROOT = Path(__file__).parents[5]


def test_what_is_collected_is_what_this_machine_is(tmp_path: Path) -> None:
    results = collect(tmp_path / "runs" / "later", head="no.such.host.invalid")
    assert results.values["numpy"] == numpy.__version__
    assert results.values["hybridflow"] == "0.1.0"
    assert results.values["CPython"] == platform.python_version()
    assert results.run_dir == str(tmp_path)
    assert results.values["cores"] == str(len(os.sched_getaffinity(0)))
    assert {"open files", "locked memory", "processes", "memory", "/dev/shm"} <= results.values.keys()
    [unknown] = [lack for lack in results.lacks if lack.what == "host names"]
    assert "no.such.host.invalid" in unknown.value
    assert results.sees_mark is None


GB = 10**9
USED = InUse(0, 0, 40 * GB, 150 * GB, ("pid 77 python3",))
RIGHT: dict[str, Any] = {
    "limits": {"open files": 1 << 20, "locked memory": resource.RLIM_INFINITY, "processes": 1000},
    "shared_memory": 1000 * GB,
    "run_dir": 10**14,
    "temporary": 90 * GB,
    "names": {"host-0": ("10.0.0.1",)},
    "in_use": [],
}


@pytest.mark.parametrize(
    ("changes", "severity", "line"),
    [
        (
            {"limits": RIGHT["limits"] | {"open files": 512}},
            "refuse",
            "open files: 512; expected at least 1,024 (ulimit -Hn)",
        ),
        (
            {"shared_memory": 67_108_864},
            "refuse",
            "/dev/shm: 67.1 MB; expected at least 536.9 MB (docker run --shm-size, or mount -o remount,size=)",
        ),
        ({"run_dir": GB // 2}, "refuse", "run_dir: 500.0 MB free; expected at least 1.0 GB"),
        (
            {"temporary": 0},
            "warn",
            "temporary directory: 0 bytes free; expected at least 1.0 GB (TMPDIR names another)",
        ),
        (
            {"names": {"host-2": (), "host-0": ("10.0.0.1",)}},
            "warn",
            "host names: host-2 not resolved; expected every host to know its own name and host 0's (/etc/hosts, DNS)",
        ),
        (
            {"in_use": [USED]},
            "refuse",
            "GPUs in use by others: GPU 0 (40.0 of 150.0 GB, pid 77 python3); expected them free, or "
            "placement.shared_gpus=true",
        ),
    ],
)
def test_what_a_host_lacks_has_its_line(changes: dict[str, Any], severity: str, line: str) -> None:
    [lack] = lacks(Needs(), **RIGHT | changes)
    assert (lack.severity, f"{lack.what}: {lack.value}; expected {lack.expected}") == (severity, line)


def test_what_the_run_needs_decides() -> None:
    odd = RIGHT | {
        "limits": {"open files": 5000, "locked memory": 2**16},
    }
    assert [lack.severity for lack in lacks(Needs(shared_gpus=True), **odd | {"in_use": [USED]})] == ["warn"]
    strict = Needs(gpus=False, open_files=8192, locks_memory=True)
    assert [(lack.severity, lack.what, lack.value) for lack in lacks(strict, **odd)] == [
        ("refuse", "open files", "5,000"),
        ("warn", "locked memory", "65,536"),
    ]


COLLECTS = """
import sys
from pathlib import Path
from hybridflow.cluster.hosts.checks.facts import collect
collect(Path("runs"))
print(sorted({"torch", "ray", "sglang", "megatron", "numpy", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_mark_is_seen_where_it_is_and_gone_after_the_block(tmp_path: Path) -> None:
    with mark_directory(tmp_path / "runs") as mark:
        assert mark.parent == tmp_path
        assert sees_mark(mark)
        assert collect(tmp_path, mark=mark).sees_mark is True
        assert not sees_mark(tmp_path / "other" / mark.name, limit_s=0.2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"^run_dir: /proc cannot be written: "), mark_directory(Path("/proc/runs")):
        pass


def test_a_file_system_has_a_kind() -> None:
    assert file_system(Path("/proc")) == "proc"
    assert file_system(Path("/no/such")) is None


def test_the_hash_of_a_recipe_is_that_of_its_values() -> None:
    assert recipe_hash({"seed": 1, "train": {"a": 2, "b": 3}}) == recipe_hash({"train": {"b": 3, "a": 2}, "seed": 1})
    assert recipe_hash({"seed": 1}) != recipe_hash({"seed": 2})


def git(root: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *settings, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def test_a_checkout_has_a_commit_and_may_be_dirty(tmp_path: Path) -> None:
    package = tmp_path / "hybridflow"
    package.mkdir()
    (package / "module.py").write_text("x = 1\n")
    assert checkout(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert checkout(tmp_path) == (commit, False)
    clean = code_hash(tmp_path)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "module.pyc").write_bytes(b"1")
    assert code_hash(tmp_path) == clean
    (package / "module.py").write_text("x = 2\n")
    assert checkout(tmp_path) == (commit, True)
    dirty = code_hash(tmp_path)
    (package / "untracked.py").write_text("")
    assert len({clean, dirty, code_hash(tmp_path)}) == 3


class NVMLError(Exception):
    """An error of pynvml."""


class Driver(ModuleType):
    """NVML of a host with three GPUs, for a machine that has none: the second is lost, this process uses the third."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")

    nvmlInit = staticmethod(lambda: None)
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlSystemGetCudaDriverVersion_v2 = staticmethod(lambda: 13010)
    nvmlDeviceGetCount = staticmethod(lambda: 3)
    nvmlDeviceGetIndex = staticmethod(lambda handle: handle)
    nvmlDeviceGetName = staticmethod(lambda handle: "NVIDIA H200")
    nvmlDeviceGetUUID = staticmethod(lambda handle: f"GPU-{handle}0{handle}0-aaaa")
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=150 * GB, used=(1 + handle) * GB))

    @staticmethod
    def nvmlDeviceGetHandleByIndex(index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    @staticmethod
    def nvmlDeviceGetHandleByUUID(name: str) -> int:
        raise NVMLError("Not Found")

    @staticmethod
    def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
        if handle == 0:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=os.getpid())]


@pytest.mark.slow
def test_gpus_their_users_and_one_that_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    results = collect(tmp_path)
    assert (results.values["driver"], results.values["CUDA"]) == ("580.1", "13.1")
    assert results.gpus == ("NVIDIA H200 of 150.0 GB", "one that cannot be read (GPU is lost)", *results.gpus[:1])
    [used] = [lack for lack in results.lacks if "GPU" in lack.what]
    assert used.value == f"GPU 2 (3.0 of 150.0 GB, pid {os.getpid()} {psutil.Process().name()})"
    assert not [lack for lack in collect(tmp_path, Needs(gpus=False)).lacks if "GPU" in lack.what]
    kind = results.gpus[0]
    for visible, kinds in (("2,1", (kind, results.gpus[1])), ("GPU-2020", (kind,)), ("", ()), ("-1", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert collect(tmp_path).gpus == kinds
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2020")
    assert [lack.value[:33] for lack in collect(tmp_path).lacks if "GPU" in lack.what] == [
        "GPU 0 (3.0 of 150.0 GB, nvidia-sm"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")
def test_gpus_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    taken = torch.zeros(3 * 2**30, dtype=torch.uint8, device="cuda:0")
    results = collect(tmp_path)
    assert len(results.gpus) == torch.cuda.device_count()
    assert results.gpus[0].startswith(torch.cuda.get_device_name(0))
    assert [lack.value for lack in results.lacks if "GPU 0 (" in lack.value] and taken.numel()
    assert results.values["driver"] and results.values["CUDA"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert collect(tmp_path).gpus == ()
