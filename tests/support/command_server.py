"""The program that `tests.support.commands` talks to: imports the stack once and forks a process for each command.

One JSON object a line on its standard input asks for a command or for a function of a module, one on its standard
output answers. Every process that is orphaned below it becomes its child: nothing that a command leaves behind escapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from engine3d.startup.imports import quick_imports

with quick_imports():
    from transformers import AutoTokenizer  # noqa: F401

    import hybridflow.cli.checkpoint
    import hybridflow.cli.main
    import hybridflow.planning.checks.recipe
    import hybridflow.planning.memory.estimate
    import hybridflow.report.page

_PR_SET_CHILD_SUBREAPER = 36
_BYTES_BEYOND = 2 << 30
"""Memory that a command may take beside what it was forked with, so that a failing test does not take the machine's."""
_GRACE_S = 3.0
"""Seconds that processes have to end by themselves once the command has."""


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if threading.active_count() > 1:
        raise RuntimeError(f"threads in a process that forks: {threading.enumerate()}")
    started = time.monotonic()
    command = os.fork()
    if command == 0:
        _run(request)
    killed = not _ends_within(command, request["kill_after_s"])
    if killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, signal.SIGKILL)
    _, status, usage = os.wait4(command, 0)
    seconds = time.monotonic() - started
    return {
        "code": os.waitstatus_to_exitcode(status),
        "killed": killed,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "left_over": _left_over(),
    }


def _ends_within(process: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _left_over() -> list[str]:
    """The command lines of what a command has left running, which is ended here."""
    deadline = time.monotonic() + _GRACE_S
    while (processes := _children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    commands = [_command_line(process) for process in processes]
    while processes:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        processes = _children()  # of those that were killed
    return commands


def _children() -> list[int]:
    """The children that live; the dead are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def _command_line(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _run(request: dict[str, Any]) -> None:
    """Run the command in the forked process. Never returns."""
    code: Any = 1
    try:
        _prepare(request)
        if "function" in request:
            module, _, name = request["function"].partition(":")
            getattr(importlib.import_module(module), name)(*request["arguments"])
            code = 0
        elif request["program"] is not None:
            os.execv(request["program"][0], [*request["program"], *request["arguments"]])
        else:
            code = hybridflow.cli.main.main(request["arguments"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    os._exit(_exit_code(code))


def _exit_code(code: Any) -> int:
    """Exit code of the interpreter: 120 if its output cannot be flushed."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return 120
    return code if isinstance(code, int) else 0 if code is None else 1


def _prepare(request: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(request["directory"])
    os.environ |= request["environment"]
    if request["mounts"]:
        _mount(request["mounts"])
    errors = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(errors, 2)
    os.close(errors)
    os.close(1)
    if request["stdout"] is not None:
        os.dup2(os.open(request["stdout"], os.O_WRONLY | os.O_CREAT, 0o600), 1)  # also if it is that already
        os.set_inheritable(1, True)
    stdout = None if request["stdout"] is None else open(1, "w", closefd=False)  # noqa: SIM115
    stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["hybridflow", *request["arguments"]]
    mapped_kb = int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line).split()[1]
    )
    limits = {resource.RLIMIT_DATA: mapped_kb * 1024 + _BYTES_BEYOND, resource.RLIMIT_CORE: 0}
    if request["open_files"] is not None:
        limits[resource.RLIMIT_NOFILE] = request["open_files"]
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _mount(mounts: dict[str, str]) -> None:
    """Give this process directories of its own that are full or may only be read."""
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for target, kind in mounts.items():
        options = {"full": "size=16k", "read-only": "ro"}[kind]
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", target], check=True)
        if kind == "full":
            with contextlib.suppress(OSError), Path(target, "filled").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass


if __name__ == "__main__":
    main()
