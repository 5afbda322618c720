"""Stacks of processes that are busy, that keep Python's lock, that were forked, that are stopped; not of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine3d.stacks import STACKS_VARIABLE, request_stacks
from hybridflow.cluster.processes.process_tree import catches, is_stopped, write_stacks

pytestmark = pytest.mark.processes

Starter = Callable[[str], psutil.Process]
# Calls from C begin frames all the time, which no signal's handler may look at meanwhile.
BUSY = "def at_work(number): pass\nwhile True:\n    for _ in map(at_work, range(10_000)): pass"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Processes that write their stacks into `stacks` when they are asked, and then do what they are told."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> psutil.Process:
        text = "from engine3d.stacks import write_stacks_on_request\nwrite_stacks_on_request()\nprint(flush=True)\n"
        environment = os.environ | {STACKS_VARIABLE: str(tmp_path / "stacks")}
        begun.append(subprocess.Popen([sys.executable, "-c", text + program], env=environment, stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None
        begun[-1].stdout.readline()
        return psutil.Process(begun[-1].pid)

    yield start
    for process in begun:
        for item in [*psutil.Process(process.pid).children(), process]:
            item.kill()
        process.communicate()


def test_a_busy_process_survives_being_asked(start: Starter, tmp_path: Path) -> None:
    process = start(BUSY)
    for _ in range(100):
        assert not request_stacks([process.pid], 30.0)
    assert process.status() != psutil.STATUS_ZOMBIE
    text = (tmp_path / "stacks").read_text()
    assert text.count(f" process {process.pid} (python") == text.count("in <module>") == 100


def test_one_that_keeps_pythons_lock_gets_a_signal(start: Starter, tmp_path: Path) -> None:
    process = start("import ctypes\ndef keeps_it(): ctypes.PyDLL(None).sleep(300)\nkeeps_it()")
    time.sleep(1.0)
    assert request_stacks([process.pid], 0.2) == [process.pid]
    write_stacks([process])
    assert "in keeps_it" in (tmp_path / "stacks").read_text()


def test_forks_write_their_own_and_do_not_write_in_between(start: Starter, tmp_path: Path) -> None:
    process = start(f"import os\nfor _ in range(3):\n    if os.fork() == 0: break\n{BUSY}")
    while len(process.children()) < 3:
        time.sleep(0.05)
    pids = [process.pid, *(child.pid for child in process.children())]
    for _ in range(10):
        assert not request_stacks(pids, 30.0)
    first, *chunks = (tmp_path / "stacks").read_text().split("--- ")
    assert not first and sorted(int(text_.split()[3]) for text_ in chunks) == sorted(10 * pids)
    assert all(text_.count("in <module>") == 1 for text_ in chunks)


def test_one_that_is_stopped_writes_when_it_goes_on(start: Starter, tmp_path: Path) -> None:
    process = start(BUSY)
    process.send_signal(signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)
    begin = time.monotonic()
    write_stacks([process])
    assert time.monotonic() - begin < 1.0 and not (tmp_path / "stacks").read_text()
    write_stacks([process], wake=True)
    assert "in <module>" in (tmp_path / "stacks").read_text()


def test_other_programs_are_left_alone(start: Starter, tmp_path: Path) -> None:
    """Also those that catch the signal, and would end by it."""
    ends = "import signal, sys, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(9)); time.sleep(300)"
    process = start(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ends!r}])")
    while not any(catches(child.pid, signal.SIGUSR2) for child in process.children()):
        time.sleep(0.05)
    [child] = process.children()
    assert request_stacks([child.pid], 30.0) == []
    write_stacks([process])
    time.sleep(0.3)
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    assert " in run\n" in (tmp_path / "stacks").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, as root alone may")
def test_other_users_may_not_ask(start: Starter, tmp_path: Path) -> None:
    process = start(BUSY)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(0 if request_stacks([process.pid], 1.0) == [process.pid] else 1)
    assert os.waitpid(child, 0)[1] == 0 and not (tmp_path / "stacks").read_text()
