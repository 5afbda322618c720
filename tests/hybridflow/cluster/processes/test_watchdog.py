"""Processes that the watchdog counts as a run's, and as ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.cluster.processes import watchdog
from hybridflow.cluster.processes.watchdog import _has_ended, run_processes
from hybridflow.rundir.status.first_failure import read_failure

pytestmark = pytest.mark.processes

# Its first thread ends, another lives on until its input closes.
HALF_ENDED = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def wait_until(condition: object, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_watchdog(directory: Path, lines: str = "") -> subprocess.Popen[bytes]:
    """Start the watchdog of a session of Ray in a directory that is made for it, and write lines to it."""
    directory.mkdir()
    command = [sys.executable, "-I", watchdog.__file__, "TEST_WATCHDOG=1", str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(lines.encode())
    process.stdin.flush()
    return process


def watches(process: subprocess.Popen[bytes]) -> bool:
    """True once the watchdog waits for the end of a process that was named to it."""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()) == "anon_inode:[pidfd]":
                return True
    return False


def test_it_ends_by_a_line_where_a_forked_process_has_its_input_open_too(tmp_path: Path) -> None:
    process = start_watchdog(tmp_path / "session", "end\nstop\n")
    assert process.wait(120) == 0 and not (tmp_path / "session").exists()
    assert process.stdin is not None
    process.stdin.close()


def test_a_process_has_ended_when_all_its_threads_have(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdin=subprocess.PIPE, stdout=log)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert not _has_ended(process.pid)
    assert process.pid in run_processes("no=marker", str(tmp_path))
    assert process.pid not in run_processes("no=marker", str(tmp_path / "other"))
    assert process.stdin is not None
    process.stdin.close()
    wait_until(lambda: _has_ended(process.pid))
    process.wait()
    assert _has_ended(process.pid)


@pytest.mark.parametrize("looks", ["reads a log", "lists a directory"])
def test_who_only_looks_at_the_files_of_a_run_is_not_of_it(looks: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs/raylet.out"
    log.write_text("started")
    seen = log if looks == "reads a log" else log.parent
    script = f"import os; os.open({str(seen)!r}, os.O_RDONLY); print('open', flush=True); input()"
    looking = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with log.open("a") as written:
        writing = subprocess.Popen(["sleep", "60"], stdout=written, start_new_session=True)
    try:
        assert looking.stdout is not None and looking.stdout.readline() == b"open\n"
        assert run_processes("no=marker", str(tmp_path)) == [writing.pid]
    finally:
        for process in (looking, writing):
            process.kill()
            process.wait(10)


def test_what_asks_all_processes_of_a_job_to_end_does_not_end_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = start_watchdog(directory)
    ignored = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{process.pid}/status")
    wait_until(lambda: int(status.read_text().partition("SigIgn:\t")[2].split()[0], 16) & ignored)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
    assert not directory.exists()


@pytest.mark.parametrize("case", ["without a word", "before the watchdog looks", "with one", "without its directory"])
def test_what_a_run_failed_of_is_kept_where_it_has_not_said_so_itself(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run of a name"
    if case != "without its directory":
        run.mkdir()
    server = subprocess.Popen(["sleep", "60"])
    end = f"{watchdog.END}\n" if case == "with one" else ""
    if case == "before the watchdog looks":
        server.kill()
        server.wait()
    process = start_watchdog(tmp_path / "ray", f"{server.pid} A part\n{watchdog.DIRECTORY} {run}\n{end}")
    assert process.stdin is not None
    if server.poll() is None:
        wait_until(lambda: watches(process))
    server.kill()
    server.wait()
    process.stdin.close()
    assert process.wait(30) == 0
    failure, lines = read_failure(run), capfd.readouterr().err.splitlines()
    if case == "with one":
        assert (failure, lines) == (None, [])
        return
    cause = f"A part (process {server.pid}) died, and the run ended without a word: by Ray, or both were killed"
    if case == "without its directory":
        assert failure is None and lines[0] == f"hybridflow: {cause}" and not any("Traceback" in line for line in lines)
        return
    assert failure is not None and (failure.phase, failure.cause) == ("start", cause)
    assert lines[:3] == [f"hybridflow: {cause}", "hybridflow: first failure", f"  cause      {cause}"]


@pytest.mark.parametrize("seen_first", ["the driver", "both", "a part"])
def test_a_part_that_is_ended_after_the_driver_is_not_the_cause(
    seen_first: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, run = tmp_path / "ray", tmp_path / "run"
    run.mkdir()
    server = subprocess.Popen(["sleep", "60"])
    process = start_watchdog(directory, f"{server.pid} A part\n{watchdog.DIRECTORY} {run}\n")
    assert process.stdin is not None
    wait_until(lambda: watches(process))
    process.send_signal(signal.SIGSTOP if seen_first == "both" else signal.SIGCONT)
    if seen_first != "a part":
        process.stdin.close()
    (directory / watchdog.ENDED).write_text(f"1 {server.pid}")  # as who holds Ray's servers does before it ends them
    server.kill()
    server.wait()
    process.stdin.close()
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0
    failure = read_failure(run)
    cause = f"the driver (process {os.getpid()}) was killed, or ended without a word"
    assert failure is not None and failure.cause == cause
    assert capfd.readouterr().err.splitlines()[0] == f"hybridflow: {cause}"
