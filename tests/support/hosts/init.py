"""PID 1 of a host: makes its namespaces and mounts, says so, and ends, and the host with it, when its parent does.

    python -I -S init.py SPECIFICATION

prints one JSON object: {"pid": ...} as its parent counts processes, {"unavailable": reason} where the machine does not
let it, or {"error": reason}. It imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import TypedDict

NAMESPACES = os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWIPC | os.CLONE_NEWNET | os.CLONE_NEWPID
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Specification(TypedDict):
    """Specification of a host.

    Attributes:
        name: host name.
        own: directories that are empty at first and the host's alone, in order, with their modes in octal.
        kept: directories and files that stay as they are, also where they lie below one of `own`.
        etc_hosts: the text of its /etc/hosts.
    """

    name: str
    mounts: dict[str, str]
    kept: list[str]
    etc_hosts: str


def main(specification: Specification) -> None:
    """Make the namespaces; of the two processes then, one is PID 1 and the other its parent, which waits for it."""
    try:
        os.unshare(NAMESPACES)
    except OSError as error:
        print(json.dumps({"unavailable": f"no namespaces can be made: {error.strerror}"}), flush=True)
        return
    if child := os.fork():
        for descriptor in (0, 1):
            os.close(descriptor)
        os.waitpid(child, 0)
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is orphaned
    pid = int(str(Path("/proc/self").readlink()))  # /proc is still the parent's
    try:
        _set_up(specification)
    except OSError as error:
        kind = "unavailable" if isinstance(error, PermissionError) else "error"
        print(json.dumps({kind: f"{specification['name']} cannot be set up: {error}"}), flush=True)
        return
    print(json.dumps({"pid": pid}), flush=True)
    while os.read(0, 1):
        pass


def _set_up(specification: Specification) -> None:
    name = specification["name"].encode()
    if _libc.sethostname(name, len(name)):
        raise OSError(ctypes.get_errno(), "sethostname")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    kept = {
        path: os.open(path, os.O_PATH) for path in ["/sys/fs/cgroup", *specification["kept"]] if Path(path).exists()
    }
    for path, mode in specification["mounts"].items():
        Path(path).mkdir(parents=True, exist_ok=True)  # it may lie below one of those before it
        _mount("tmpfs", path, "tmpfs", 0, f"mode={mode}")
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")  # /sys/class/net is that of the namespace
    for path, descriptor in kept.items():
        source = f"/proc/self/fd/{descriptor}"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(Path(path).stat(), os.fstat(descriptor)):
                continue
        if not Path(path).exists():
            (Path(path) if Path(source).is_dir() else Path(path).parent).mkdir(parents=True, exist_ok=True)
            if not Path(source).is_dir():
                Path(path).touch()
        _mount(source, path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    Path("/run/hosts").write_text(specification["etc_hosts"])
    _mount("/run/hosts", "/etc/hosts", None, MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    if _libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]):
        raise OSError(ctypes.get_errno(), f"mount of {source or ''} at {target}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
