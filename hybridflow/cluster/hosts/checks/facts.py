"""Facts of one host before a run: versions, devices, room, limits, names. Nothing heavy is imported."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from engine3d.errors import UserError, amount
from hybridflow.cluster.devices.gpu_availability import EXPECTED, InUse, gpus_in_use
from hybridflow.cluster.devices.nvml import NvmlReader, driver_versions, visible_gpus
from hybridflow.cluster.hosts.description import Host

MUST_AGREE = ("hybridflow", "torch", "megatron-core", "transformer-engine", "sglang", "ray", "nvidia-nccl-cu13")
SHOULD_AGREE = ("numpy", "safetensors")
"""Distributions whose versions are compared: a difference is refused, or warned of."""
DISTRIBUTIONS = (*MUST_AGREE, *SHOULD_AGREE)
THIS = Host(0, "this machine", "this machine")
"""The host of this process, where nobody has counted it."""
_CODE = ("hybridflow", "engine3d")
_ROOT = Path(__file__).parents[4]
_GIT_S = 5.0
_RESOLVE_S = 3.0
_SHARED_MEMORY = Path("/dev/shm")
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Limits of control groups 2, where "max" is no limit, and 1, where more than any machine has is none."""
_TEMPORARY_BYTES = 10**9
NOTHING = "none"
Severity = Literal["refuse", "warn"]
_MARK_S = 3.0
_MARK_EVERY_S = 0.1
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """A host's clock against that of host 0.

    Args:
        seconds: that it is ahead; negative where it is behind.
        uncertainty_s: half of the time that the question took.
    """

    seconds: float
    uncertainty_s: float

    @classmethod
    def measured(cls, asked_s: float, told_s: float, answered_s: float) -> ClockDifference:
        """Difference of a clock that was read between two readings of this host's.

        Args:
            asked_s: by this host's clock, before.
            told_s: by the other's.
            answered_s: by this host's, after.
        """
        return cls(told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)

    @property
    def least_s(self) -> float:
        """Least possible difference."""
        return max(0.0, abs(self.seconds) - self.uncertainty_s)


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a run on its hosts.

    Args:
        gpus: whether it uses any.
        shared_gpus: whether others may use them too, as `placement.shared_gpus`.
        gpus_within_s: seconds for which memory of GPUs may still come free, as after a run that has just ended.
        run_dir_bytes: free, where the run's directory is.
        open_files: of each process.
        shared_memory_bytes: of /dev/shm.
        locks_memory: whether the network's devices read memory by themselves (InfiniBand, RoCE, EFA).
    """

    gpus: bool = True
    shared_gpus: bool = False
    gpus_within_s: float = 0.0
    run_dir_bytes: int = 10**9
    open_files: int = 1024
    shared_memory_bytes: int = 512 * 2**20
    locks_memory: bool = False


@dataclass(frozen=True, slots=True)
class Lack:
    """A value that is wrong on a host by itself.

    Args:
        severity: whether a run is refused for it.
        what: has the value, such as "open files".
        value: as it is.
        expected: instead.
    """

    severity: Severity
    what: str
    value: str
    expected: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of one host.

    Args:
        values: compared between hosts, by the title of their column. One that is not known is None.
        gpus: kinds of those that CUDA_VISIBLE_DEVICES leaves.
        lacks: wrong on the host by itself.
        run_dir: the directory of runs, or its nearest parent that is there.
        sees_mark: whether the driver's mark is there. None if there is none to look for.
        host: in the run.
        clock: against that of host 0. None for host 0.
    """

    values: Mapping[str, str | None]
    gpus: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()
    run_dir: str = ""
    sees_mark: bool | None = None
    host: Host = THIS
    clock: ClockDifference | None = None


def collect(run_dir: Path, needs: Needs | None = None, head: str | None = None, mark: Path | None = None) -> HostFacts:
    """Collect facts of this host, in about 0.1 s; in some seconds where a name server or a shared disk does not answer.

    Args:
        run_dir: the recipe's `run_dir`.
        needs: of the run.
        head: host name of host 0, to be resolved here.
        mark: that the driver has made on host 0, as the path of `mark_directory`.
    """
    there, needs = _nearest(run_dir), needs or Needs()
    commit, dirty = _checkout(_ROOT)
    driver, cuda = driver_versions()
    gpus = visible_gpus()
    limits = {name: resource.getrlimit(which)[1] for name, which in _LIMITS.items()}
    shared_memory = _disk_usage(_SHARED_MEMORY)
    kinds = tuple(_gpu_kind(name) for name in gpus.values())
    values = {
        **{name: _version(name) or NOTHING for name in DISTRIBUTIONS},
        "CPython": platform.python_version(),
        "kernel": platform.release(),
        "code": code_hash(_ROOT),
        "commit": commit and commit + ("*" if dirty else ""),
        "driver": driver,
        "CUDA": cuda,
        "GPUs": f"{len(kinds)} x {' and '.join(sorted(set(kinds)))}" if kinds else NOTHING,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _rounded(machine_bytes()),
        "/dev/shm": None if shared_memory is None else _rounded(shared_memory.total),
        "run_dir": file_system(there),
        **{name: "unlimited" if limit == resource.RLIM_INFINITY else str(limit) for name, limit in limits.items()},
    }
    wrong = lacks(
        needs,
        limits=limits,
        shared_memory=None if shared_memory is None else shared_memory.total,
        run_dir=_free(there),
        temporary=_free(_temporary()),
        names=_resolved([socket.gethostname(), *([head] if head else [])]),
        in_use=gpus_in_use(gpus, needs.gpus_within_s) if needs.gpus else (),
    )
    return HostFacts(values, kinds, tuple(wrong), str(there), None if mark is None else sees_mark(mark))


def lacks(
    needs: Needs,
    *,
    limits: Mapping[str, int],
    shared_memory: int | None,
    run_dir: int | None,
    temporary: int | None,
    names: Mapping[str, Sequence[str]],
    in_use: Sequence[InUse],
) -> Iterator[Lack]:
    """Values that are wrong on a host by itself. One that is not known is right.

    Args:
        needs: of the run.
        limits: hard ones, by the titles of their columns.
        shared_memory: bytes of /dev/shm.
        run_dir, temporary: free bytes of these directories.
        names: addresses of this host's name and of host 0's. None for a name that does not resolve.
        in_use: GPUs that others use.
    """
    files, locked = limits["open files"], limits["locked memory"]
    if files != resource.RLIM_INFINITY and files < needs.open_files:
        yield Lack("refuse", "open files", f"{files:,}", f"at least {needs.open_files:,} (ulimit -Hn)")
    if needs.locks_memory and locked != resource.RLIM_INFINITY:
        expected = "unlimited (ulimit -Hl): the network's devices read memory that is locked"
        yield Lack("warn", "locked memory", f"{locked:,}", expected)
    if shared_memory is not None and shared_memory < needs.shared_memory_bytes:
        expected = f"at least {amount(needs.shared_memory_bytes, 1)} (docker run --shm-size, or mount -o remount,size=)"
        yield Lack("refuse", "/dev/shm", amount(shared_memory, 1), expected)
    if run_dir is not None and run_dir < needs.run_dir_bytes:
        yield Lack("refuse", "run_dir", f"{amount(run_dir, 1)} free", f"at least {amount(needs.run_dir_bytes, 1)}")
    if temporary is not None and temporary < _TEMPORARY_BYTES:
        expected = f"at least {amount(_TEMPORARY_BYTES, 1)} (TMPDIR names another)"
        yield Lack("warn", "temporary directory", f"{amount(temporary, 1)} free", expected)
    if unknown := sorted(name for name, addresses in names.items() if not addresses):
        expected = "every host to know its own name and host 0's (/etc/hosts, DNS)"
        yield Lack("warn", "host names", f"{', '.join(unknown)} not resolved", expected)
    severity: Severity = "warn" if needs.shared_gpus else "refuse"
    for gpu in in_use:
        yield Lack(severity, "GPUs in use by others", str(gpu), EXPECTED)


def _rounded(nbytes: int) -> str:
    """Two digits, so that hosts of one kind agree."""
    return f"{float(f'{nbytes / 1e9:.2g}'):,g} GB"


def machine_bytes(groups: Path = _GROUPS) -> int:
    """Memory that this process's machine has, or its container's share of it.

    Args:
        groups: where control groups say how much they may take.
    """
    limits = [int(psutil.virtual_memory().total)]
    for name in _MEMORY_LIMITS:
        try:
            limits.append(int((groups / name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def software_digest() -> str:
    """Hash of versions and code that must be the same on all hosts, for a host that comes back."""
    versions = {name: version for name, version in installed_versions().items() if name in MUST_AGREE}
    return _digest([json.dumps(versions, sort_keys=True).encode(), code_hash(_ROOT).encode()])


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that hosts compare, without those that are not installed."""
    return {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}


def checkout_commit() -> str | None:
    """The commit of this code's checkout, marked where files differ from it; None outside a checkout."""
    commit, dirty = _checkout(_ROOT)
    return f"{commit} with changes" if commit is not None and dirty else commit


def recipe_hash(settings: Mapping[str, Any]) -> str:
    """Hash of a recipe as it was read, its bases and overrides applied; the order of keys does not count."""
    return _digest([json.dumps(settings, sort_keys=True, default=str).encode()])


def code_hash(root: Path) -> str:
    """Hash of the text of the project's packages.

    Args:
        root: the directory that holds them.
    """
    # Names as text: paths take three times as long to sort and to compare.
    files = sorted(
        str(folder / name)
        for top in _CODE
        for folder, _, names in (root / top).walk()
        for name in names
        if not name.endswith(".pyc")
    )
    texts = (file for file in files if Path(file).is_file())
    return _digest(
        chunk for file in texts for chunk in (file.removeprefix(str(root)).encode(), Path(file).read_bytes())
    )


@contextlib.contextmanager
def mark_directory(directory: Path, setting: str = "run_dir") -> Iterator[Path]:
    """Make an empty file of a random name that hosts with the same directory see as well; it goes with the block.

    Args:
        directory: the file is in it, or in its nearest parent that is there.
        setting: that names it.

    Raises:
        UserError: it cannot be written.
    """
    path = _nearest(directory) / f".hybridflow-{secrets.token_hex(16)}"
    try:
        path.touch(mode=0o600, exist_ok=False)
    except OSError as error:
        raise UserError(f"{setting}: {path.parent} cannot be written: {error.strerror}") from None
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def sees_mark(mark: Path, limit_s: float = _MARK_S) -> bool:
    """True if another host's mark is here; one that is not is waited for, as a network file system shows it late.

    Args:
        mark: its path on the host that made it.
        limit_s: of the waiting.
    """
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if mark.exists():
                return True
            # Has the client of a network file system ask its server anew.
            next(os.scandir(mark.parent), None)
        if time.monotonic() >= deadline:
            return False
        time.sleep(_MARK_EVERY_S)


def file_system(path: Path) -> str | None:
    """Kind and source of the file system that a directory is on, such as "nfs4 filer:/runs"; None if not known."""
    path = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not path.exists() or not mounts:
        return None
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint))  # of one place the last one is seen
    return mount.fstype if mount.device in (mount.fstype, "none") else f"{mount.fstype} {mount.device}"


def _digest(chunks: Any) -> str:
    results = hashlib.sha256()
    for chunk in chunks:
        results.update(len(chunk).to_bytes(8, "little") + chunk)
    return results.hexdigest()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout(root: Path) -> tuple[str | None, bool | None]:
    """Commit of a checkout, and whether its files differ from it; None for both where there is none."""
    if not (root / ".git").exists():
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changed is None else bool(changed)


def _git(root: Path, *words: str) -> str | None:
    # The checkout may be another user's, as in a container, and its index is not to be written.
    command = ["git", "-c", f"safe.directory={root}", "--no-optional-locks", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu_kind(name: str) -> str:
    """Kind and memory of a GPU as CUDA_VISIBLE_DEVICES names it; one that is lost has that for its kind."""
    try:
        reader = NvmlReader([name])
        [gpu] = reader.gpus
        return f"{reader.name(gpu)} of {amount(reader.memory(gpu).total_bytes, 1)}"
    except Exception as error:  # of the library
        return f"one that cannot be read ({error})"


def _nearest(directory: Path) -> Path:
    directory = directory.absolute()
    return next((path for path in (directory, *directory.parents) if path.is_dir()), Path("/"))


def _disk_usage(directory: Path | None) -> Any:
    """Bytes of a file system. None if they are not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory or "")
    return None


def _free(directory: Path | None) -> int | None:
    usage = _disk_usage(directory)
    return None if usage is None else usage.free


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # none that can be written
        return None


def _resolved(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Addresses of names, as far as they are found in time: a name server that is gone is not waited for."""
    results: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())

    def resolve(name: str) -> None:
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            results[name] = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))

    threads = [threading.Thread(target=resolve, args=(name,), daemon=True) for name in results]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _RESOLVE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)
