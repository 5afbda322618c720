"""Hostile programs, each contained, with its verdict, and with nothing left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.sandbox.program import ProgramLimits, Verdict
from tests.hybridflow.sandbox.conftest import LIMITS, Run, worker_mark

pytestmark = pytest.mark.processes

PROGRAMS = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", Verdict.PROCESSES),
    "patient fork bomb": (
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        Verdict.PROCESSES,
    ),
    "threads": (
        """
        import threading, time
        threading.stack_size(1 << 18)
        while True:
            threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
        """,
        Verdict.PROCESSES,
    ),
    "endless loop": ("while True:\n    pass", Verdict.TIMEOUT),
    "endless wait": ("import time\ntime.sleep(1000)", Verdict.TIMEOUT),
    "endless loop that catches signals": (
        """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
        """,
        Verdict.TIMEOUT,
    ),
    "endless chain of processes that nobody waits for": (
        """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            if os.fork() == 0:
                end = time.perf_counter() + 0.004
                while time.perf_counter() < end:
                    pass
                os._exit(0)
            try:
                os.wait()
            except ChildProcessError:
                pass
        """,
        Verdict.TIMEOUT,
    ),
    "memory bomb": ("kept = []\nwhile True:\n    kept.append(bytearray(10**6))", Verdict.MEMORY),
    "one large array": ("bytearray(10**12)", Verdict.MEMORY),
    "memory bomb of several processes": (
        """
        import mmap, os, time
        for _ in range(4):
            if os.fork() == 0:
                shared = mmap.mmap(-1, 60 << 20)
                shared.write(bytes(60 << 20))
                time.sleep(99)
        time.sleep(99)
        """,
        Verdict.MEMORY,
    ),
    "1 GB of output": (
        "import sys\nfor _ in range(1000):\n    sys.stdout.write('x' * 10**6)",
        Verdict.OUTPUT,
    ),
    "1 GB of errors": (
        "import sys\nfor _ in range(1000):\n    sys.stderr.write('x' * 10**6)",
        Verdict.OUTPUT,
    ),
    "large file": (
        "with open('large', 'wb') as file:\n    for _ in range(1000):\n        file.write(bytes(10**6))",
        Verdict.FAILED,
    ),
    "many files": (
        """
        for number in range(1000):
            with open(f"file{number}", "wb") as file:
                file.write(bytes(10**6))
        """,
        Verdict.FAILED,
    ),
    "end by a signal": ("import os\nos.kill(os.getpid(), 9)", Verdict.FAILED),
    "stack overflow": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", Verdict.FAILED),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bombs_end_with_their_verdict(run: Run, name: str) -> None:
    source, verdict = PROGRAMS[name]
    result = run(textwrap.dedent(source))
    assert (result.verdict, result.stderr[-300:] if result.verdict is not verdict else b"") == (verdict, b"")
    assert len(result.stdout) <= 10**5
    assert len(result.stderr) <= 10**5
    assert _processes_left() == []
    assert run("print('unharmed')").stdout == b"unharmed\n"


def test_a_program_may_use_its_limits(run: Run) -> None:
    source = """
    import multiprocessing, pathlib, sys
    kept = bytearray(60 * 10**6)
    pathlib.Path("data").mkdir()
    pathlib.Path("data/file").write_bytes(bytes(3 * 10**6))
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]), sys.stdin.read(), end="")
    sys.stdout.write("x" * 90_000)
    """
    result = run(textwrap.dedent(source), stdin=b"given")
    assert (result.verdict, result.exit_code, result.stderr) == (Verdict.EXITED, 0, b"")
    assert result.stdout == b"[1, 2] given" + b"x" * 90_000


def _refused(*statements: str) -> str:
    """Source code that prints each statement that does not raise OSError."""
    lines = ["import ctypes, os, pathlib, signal, socket"]
    for statement in statements:
        lines += ["try:", f"    print({statement!r}, {statement})", "except OSError:", "    pass"]
    return "\n".join(lines)


def test_nothing_outside_is_written(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("unharmed")
    source = _refused(
        *(f"open({path!r}, 'w')" for path in (str(target), "/file", "/usr/file", "/etc/file", "/dev/file", "/input")),
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "os.mkdir('/root/directory')",
        "os.chmod('/usr/bin/env', 0o777)",
        "os.remove('/input')",
        "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))",
        "os.chroot('/tmp')",
    )
    assert run(source).stdout == b""
    assert target.read_text() == "unharmed"


def test_nothing_of_the_run_is_read(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    source = """
    import os, pathlib, sys
    found = [path for path in sys.argv[1:] if os.path.exists(path)]
    found += [str(path) for path in pathlib.Path("/").iterdir() if path.name in ("home", "work", "mnt", "run", "var")]
    os.symlink("/proc/1/root", "link")
    for start in ("/proc/1/root", "/proc/1/cwd", "link", "/proc/self/root/..", "/dev/fd/../../1/root", "../.."):
        for path in sys.argv[1:]:
            if os.path.exists(start + path):
                found.append(start + path)
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.path.exists(f"/proc/self/fd/{name}/.."):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    for number in (1, os.getpid()):
        try:
            found += [word for word in open(f"/proc/{number}/environ").read().split("\\0") if "secret" in word.lower()]
        except OSError:
            pass
    print(found)
    """
    paths = [str(secret), __file__, "/etc/passwd", "/etc/shadow", "/sys/kernel"]
    listed = textwrap.dedent(source).replace("sys.argv[1:]", repr(paths))
    os.environ["HYBRIDFLOW_TEST_SECRET"] = "secret"
    try:
        result = run(listed)
    finally:
        del os.environ["HYBRIDFLOW_TEST_SECRET"]
    assert (result.stdout, result.stderr) == (b"[]\n", b"")


def test_no_network(run: Run) -> None:
    with _Listener() as port:
        source = _refused(
            f"socket.create_connection(('127.0.0.1', {port}), timeout=1)",
            f"socket.create_connection(('::1', {port}), timeout=1)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)",
            "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
            "socket.socketpair(socket.AF_TIPC, socket.SOCK_SEQPACKET)",
            "socket.getaddrinfo('localhost', 80) and socket.create_connection(('localhost', 80))",
        )
        assert run(source).stdout == b""
    assert run("import socket\none, other = socket.socketpair()\none.send(b'x')\nprint(other.recv(1))").stdout


class _Listener:
    """A server on loopback, with its port."""

    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.close()


SYSTEM_CALLS = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
calls = {numbers}
for name, (number, *arguments) in calls.items():
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print(name, ctypes.get_errno())
"""


def test_no_way_to_other_processes_and_to_the_kernel(run: Run) -> None:
    calls = {
        "ptrace": (101, 0, 0, 0, 0),
        "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
        "unshare of the user namespace": (272, 0x10000000),
        "clone into a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
        "clone3": (435, 0, 0),
        "setns": (308, 0, 0),
        "memfd_create": (319, b"x", 0),
        "shmget": (29, 0, 1 << 30, 0o1600),
        "bpf": (321, 0, 0, 0),
        "perf_event_open": (298, 0, 0, -1, -1, 0),
        "userfaultfd": (323, 0),
        "io_uring_setup": (425, 1, 0),
        "keyctl": (250, 0, 0),
        "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0),
        "setpriority": (141, 0, 0, 19),
        "ioctl that types into a terminal": (16, 0, 0x5412, 0),
    }
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of system calls of x86_64")
    assert run(SYSTEM_CALLS.format(numbers=calls)).stdout == b""


def test_no_other_process_is_killed(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as bystander:
        try:
            source = f"""
import os, signal
for pid in ({bystander.pid}, {os.getpid()}, 1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
os.kill(-1, signal.SIGKILL)
"""
            result = run(source)
            assert (result.stdout, bystander.poll()) in ((b"True\n", None), (b"", None))
        finally:
            bystander.kill()


def test_a_daemon_ends_with_its_program(run: Run) -> None:
    source = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            {closing}
            while True:
                time.sleep(0.001)
        os._exit(0)
    os.wait()
    print("left")
    """
    for closing in ("os.closerange(0, 100)", "pass"):
        result = run(textwrap.dedent(source).format(closing=closing))
        assert (result.verdict, result.stdout) == (Verdict.EXITED, b"left\n")
        assert _processes_left() == []


def test_programs_do_not_see_each_others_files(run: Run) -> None:
    assert run("open('/tmp/left', 'w').write('x')\nopen('/dev/shm/left', 'w').write('x')").verdict is Verdict.EXITED
    assert run("import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout == b"['main.py'] []\n"


OWNER = """
import asyncio
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import ProgramLimits, SandboxProgram
async def main():
    sandbox = LocalSandbox(SandboxSettings(limits=ProgramLimits(timeout_s=900)))
    await sandbox.run(SandboxProgram(("python3", "-c", "import time; time.sleep(1000)", "MARK")))
asyncio.run(main())
"""


def test_programs_end_with_the_process_that_runs_them(run: Run) -> None:
    mark = f"{worker_mark()}-of-another"
    with subprocess.Popen([sys.executable, "-c", OWNER.replace("MARK", mark)]) as owner:
        while not any("import time; time.sleep(1000)" in words[1:3] for words in _commands(mark)):
            assert owner.poll() is None
            time.sleep(0.01)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while _commands(mark):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_limit_of_one_process(run: Run) -> None:
    one = ProgramLimits(**{**LIMITS.model_dump(), "processes": 1})
    assert run("print(1)", limits=one).stdout == b"1\n"
    assert run("import os\nos.fork()", limits=one).verdict is Verdict.PROCESSES


def _commands(mark: str) -> list[list[str]]:
    """Command lines of the machine's processes that have a word in them."""
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            commands += [command] if mark in (command := process.cmdline()) else []
    return commands


def _processes_left() -> list[list[str]]:
    """Processes of programs of these tests that are still there after a while."""
    deadline = time.monotonic() + 10
    while (left := _commands(worker_mark())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
