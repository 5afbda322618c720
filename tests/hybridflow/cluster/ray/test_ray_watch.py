"""Watch of Ray's processes, on processes that are none of Ray's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine3d.errors import EngineError
from hybridflow.cluster.processes import watchdog
from hybridflow.cluster.ray.ray_watch import RayWatch

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def _watch(server: subprocess.Popen[bytes], limit_s: float) -> tuple[RayWatch, threading.Event, list[str]]:
    results, lines = threading.Event(), list[str]()

    def lost(line: str) -> None:
        lines.append(line)
        results.set()

    def read_end() -> tuple[str, bool]:
        number = signal.Signals(-server.wait())
        return f"Ray's raylet (process {server.pid}) was killed by {number.name}", False

    ends = os.pidfd_open(server.pid)
    return RayWatch({"Ray's raylet": server.pid}, ends, read_end, lost, quiet_s=0.1, limit_s=limit_s), results, lines


def test_a_part_that_dies_is_named(server: subprocess.Popen[bytes]) -> None:
    watch, results, lines = _watch(server, 60)
    watch.check()
    server.kill()
    assert results.wait(5)
    line = f"Ray's raylet (process {server.pid}) was killed by SIGKILL, and the run cannot go on without it"
    assert lines == [line]
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        watch.check()
    watch.close()


def test_a_part_that_stands_still_is_named_and_is_given_up_in_the_end(
    server: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    watch, results, lines = _watch(server, 1.5)
    server.send_signal(signal.SIGSTOP)
    assert results.wait(10)
    watch.close()
    assert lines == [f"Ray's raylet (process {server.pid}) has been stopped for 1.5 s (limits.call_s)"]
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"hybridflow: Ray's raylet (process {server.pid}) has been stopped since ")


def test_nothing_is_said_of_parts_that_end_after_the_watch(server: subprocess.Popen[bytes]) -> None:
    watch, _, lines = _watch(server, 60)
    watch.close()
    watch.close()
    server.kill()
    server.wait()
    assert not lines
    watch.check()


@pytest.mark.parametrize(("said", "line"), [(False, "hybridflow: Ray's raylet (process {pid}) died, "), (True, "")])
def test_the_watchdog_has_the_last_word_where_the_driver_has_said_none(
    server: subprocess.Popen[bytes], tmp_path: Path, said: bool, line: str
) -> None:
    directory = tmp_path / "ray"
    command = [sys.executable, "-I", watchdog.__file__, f"MARKER={directory}", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(f"{server.pid} Ray's raylet\n".encode())
        process.stdin.flush()
        os.set_blocking(process.stderr.fileno(), True)
        if said:
            process.stdin.write(f"{watchdog.END}\n".encode())
        else:
            while "pidfd" not in "".join(_files(process.pid)):
                assert process.poll() is None
        server.kill()
        server.wait()
        process.stdin.close()
        warnings = process.stderr.read().decode()
    assert warnings.startswith(line.format(pid=server.pid))
    assert len(warnings.splitlines()) == (0 if said else 1)


def _files(pid: int) -> list[str]:
    try:
        return [str(item.readlink()) for item in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []
