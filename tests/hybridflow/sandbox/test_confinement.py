"""Means of a machine, and what is missing."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.sandbox import seccomp
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.opening import means_of_this_machine
from hybridflow.sandbox.process import _ProgramTime
from hybridflow.sandbox.program import SandboxError, SandboxProgram, Verdict, python_program
from hybridflow.sandbox.usage import ProgramUsage
from tests.hybridflow.sandbox.conftest import LIMITS, Run

ROOT = Path(__file__).parents[3]
HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),  # of aarch64
)

AS_ANOTHER_USER = """
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir -p "$1/python" "$1/tests"
mount --bind "$2" "$1/python"
chmod 777 "$1/tests"
python=$(readlink -f "$2")
mount -t tmpfs -o mode=755 tmpfs /root
mkdir -p "$python"
mount --bind "$1/python" "$python"
cd "$3"
shift 3
exec setpriv --reuid=4321 --regid=4321 --clear-groups "$@"
"""
"""Runs a command as a user who is not root, and who can read an interpreter that is below /root."""


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("bwrap"), reason="root makes another user; bubblewrap")
def test_hostile_programs_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as directory:  # below none that root alone can enter
        _run_as_another_user(directory)


def _run_as_another_user(directory: str) -> None:
    words = [
        *("unshare", "--mount", "sh", "-c", AS_ANOTHER_USER, "sh", directory, sys.base_prefix, str(ROOT)),
        *("env", "PYTHONDONTWRITEBYTECODE=1", f"HOME={directory}/tests", f"TMPDIR={directory}/tests"),
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={directory}/tests/base"),
        "tests/hybridflow/sandbox/test_hostile.py",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert re.search(r"^\d\d passed in", done.stdout, re.MULTILINE), done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.processes
def test_programs_have_libraries_of_another_interpreter(run: Run) -> None:
    async def printed(settings: SandboxSettings) -> bytes:
        sandbox = LocalSandbox(settings)
        return (await sandbox.run(python_program("import pydantic, sys\nprint(sys.prefix)"))).stdout

    assert asyncio.run(printed(SandboxSettings(python=Path(sys.executable)))) == f"{sys.prefix}\n".encode()
    assert asyncio.run(printed(SandboxSettings())) == b""


@pytest.mark.processes
def test_programs_read_what_is_below_the_directory_of_temporary_files(run: Run) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        (Path(directory) / "words").write_text("one two")
        (Path(directory) / "words").chmod(0o666)
        source = f"path = {directory + '/words'!r}\nprint(open(path).read())\nopen('/tmp/own', 'w')\nopen(path, 'w')"
        sandbox = LocalSandbox(SandboxSettings(read_only=(Path(directory),)))
        result = asyncio.run(sandbox.run(python_program(source)))
        assert result.stdout == b"one two\n"
        assert b"Read-only file system" in result.stderr
        assert (Path(directory) / "words").read_text() == "one two"


@pytest.mark.processes
def test_without_isolation_only_resources_are_limited(tmp_path: Path) -> None:
    """A program that is trusted still has a verdict, and leaves no files."""
    sandbox = LocalSandbox(SandboxSettings(isolation="none", limits=LIMITS))
    sources = {
        f"import os\nprint(os.path.exists({str(ROOT)!r}), input())": Verdict.EXITED,
        "import time\ntime.sleep(100)": Verdict.TIMEOUT,
        "kept = []\nwhile True: kept.append(bytearray(10**6))": Verdict.MEMORY,
        "import os, time\nfor _ in range(20): os.fork() or time.sleep(99)\ntime.sleep(99)": Verdict.PROCESSES,
        "while True: print('x' * 1000)": Verdict.OUTPUT,
    }

    async def ends() -> list[tuple[Verdict, bytes]]:
        results = [await sandbox.run(python_program(source, stdin=b"given")) for source in sources]
        return [(result.verdict, result.stdout[:20]) for result in results]

    results = asyncio.run(ends())
    assert [verdict for verdict, _ in results] == list(sources.values())
    assert results[0][1] == b"True given\n"


@pytest.mark.processes
def test_a_machine_out_of_descriptors_is_no_verdict(run: Run) -> None:
    import resource

    async def failure() -> str:
        sandbox = LocalSandbox(SandboxSettings(limits=LIMITS))
        await sandbox.start()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with Path(os.devnull).open() as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 2, limits[1]))
        try:
            await sandbox.run(python_program("print(1)"))
        except SandboxError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return ""

    assert "Too many open files" in asyncio.run(failure())


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = asyncio.run(means_of_this_machine())
    assert line.startswith("sandbox: the program bwrap is not installed (package bubblewrap); expected")
    assert "\n" not in line
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    line = asyncio.run(means_of_this_machine())
    assert line.startswith("sandbox: a program could not be set up: bwrap: No permissions to create new namespace;")
    fake.write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n')  # confines nothing
    assert re.match(r"sandbox: .*; expected a machine that isolates programs", asyncio.run(means_of_this_machine()))
    with pytest.raises(UserError, match="no filter of system calls for riscv64"):
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        asyncio.run(LocalSandbox(SandboxSettings()).start())


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_numbers_of_system_calls_are_the_kernels(column: int) -> None:
    if not HEADERS[column].exists():
        pytest.skip(f"no {HEADERS[column]}")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text()))
    known = {name: str(calls[column]) for name, calls in {**seccomp._DENIED, **seccomp._ABSENT}.items()}
    machine = list(seccomp._MACHINES.values())[column]
    known |= {name: str(getattr(machine, name)) for name in ("clone", "socket", "socketpair", "ioctl")}
    assert {name: numbers.get(name, number) for name, number in known.items()} == known


def test_the_time_of_a_program_is_not_that_of_a_busy_machine() -> None:
    spent = _ProgramTime()
    spent.add(ProgramUsage(1, 0, computed_s=0.1, ready=True), [7], elapsed_s=5.0)
    assert spent.until(9.0) == pytest.approx(0.15)
    spent.add(ProgramUsage(1, 0, computed_s=0.1, ready=False), [7], elapsed_s=9.0)
    assert spent.until(9.01) == pytest.approx(0.1 + 4.0 + 0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user")
def test_memory_that_cannot_be_shared_out_counts_for_each() -> None:
    source = """
import os, sys
from hybridflow.sandbox.usage import shared_memory_bytes, usage_of
os.setgroups([]); os.setresgid(4321, 4321, 4321); os.setresuid(4321, 4321, 4321)
parent = [os.getppid()]
assert 0 < shared_memory_bytes(parent) <= 2 * usage_of(parent).memory_bytes
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ((), {}),
        (("a\0",), {}),
        (("\ud800",), {}),
        (("a",), {"\ud800": b""}),
        (("a",), {"/x": b""}),
        (("a",), {"a/../b": b""}),
        (("a",), {"": b""}),
    ],
)
def test_what_is_no_program(command: tuple[str, ...], files: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SandboxProgram(command, files)


@pytest.mark.processes
def test_the_example_of_the_page_runs(run: Run) -> None:
    source = (ROOT / "docs/sandbox.md").read_text().partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("exited 42\nexited ['a', 'b']\n", "")
