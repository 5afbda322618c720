"""Signals end a command once, whatever it is at; putting things away hides nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine3d.errors import EngineError
from hybridflow.cluster.processes.termination import LEAVE, Abandoned, Terminated, Termination
from tests.support.runs import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture
def termination() -> Iterator[Termination]:
    termination = Termination()
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # shells have what runs in the background ignore it
    with termination.handled():
        termination.begin()
        yield termination
    signal.signal(signal.SIGINT, before)


def test_a_signal_that_comes_before_the_block_interrupts_it_where_it_begins(
    capfd: pytest.CaptureFixture[str],
) -> None:
    termination = Termination()
    with termination.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Terminated):
            termination.begin()
        assert termination.finish() == 143
    assert capfd.readouterr().err == "hybridflow: terminated\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_interrupts_once_and_is_the_cause(
    termination: Termination, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    used: list[str] = []
    termination.add_resort(lambda: used.append("resort"))
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGINT)  # while things are put away
    assert termination.finish() == code
    assert used == ["resort"]
    assert capfd.readouterr().err == f"hybridflow: {'terminated' if code == 143 else 'interrupted'}\n"


def test_a_cause_that_a_thread_finds_is_told_at_once_and_wakes_the_main_thread(
    termination: Termination, capfd: pytest.CaptureFixture[str]
) -> None:
    said_before: list[str] = []
    arguments = ["hybridflow: the raylet is gone", lambda: said_before.append(capfd.readouterr().err)]
    with pytest.raises(Terminated):
        threading.Timer(0.05, termination.end, arguments).start()
        threading.Event().wait(600)
    assert termination.finish() == 1
    assert said_before == [""]
    assert capfd.readouterr().err == "hybridflow: the raylet is gone\n"
    assert not termination.end("and another")


def wait_with(termination: Termination) -> None:
    with termination.abandonable(), termination.waiting():
        threading.Event().wait(10)


def test_with_time_to_save_a_signal_interrupts_waits_alone(
    termination: Termination, capfd: pytest.CaptureFixture[str]
) -> None:
    with termination.saves(20.0):
        assert not termination.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.stop_requested
        first = ""
        while not first.endswith("\n"):  # a thread tells it
            first += capfd.readouterr().err
        with pytest.raises(Abandoned):
            wait_with(termination)
        with pytest.raises(Terminated):
            termination.end_asked("the checkpoint of step 3 is whole")
    assert termination.finish() == 75
    assert first.startswith("hybridflow: terminated: the run saves a checkpoint, within 20 s, and ends; ")
    assert capfd.readouterr().err == "hybridflow: terminated; the checkpoint of step 3 is whole\n"


def test_a_wait_under_way_is_abandoned_and_what_is_not_abandonable_goes_on(termination: Termination) -> None:
    with termination.saves(20.0):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(Abandoned):
            wait_with(termination)
        with termination.waiting():  # as of an update
            pass
        with pytest.raises(Terminated):
            termination.end_asked(None)
    assert termination.finish() == 130


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemError])
def test_a_wait_in_a_library_that_makes_another_error_of_it_is_abandoned_too(
    termination: Termination, kind: type[BaseException]
) -> None:
    def wait() -> None:
        with termination.abandonable(), termination.waiting():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(10)
            except Abandoned as error:
                raise kind from error

    with termination.saves(20.0):
        with pytest.raises(SystemError, match="of its own"), termination.abandonable(), termination.waiting():
            raise SystemError("of its own")
        with pytest.raises(Abandoned):
            wait()
        with pytest.raises(Terminated):
            termination.end_asked(None)
    assert termination.finish() == 143


def test_when_the_time_to_save_is_over_a_run_ends_as_without(
    termination: Termination, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Terminated), termination.saves(0.2):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Event().wait(600)
    assert not termination.stop_requested
    assert termination.finish() == 143
    assert capfd.readouterr().err.endswith("hybridflow: terminated; there was no time for a checkpoint\n")


@contextlib.contextmanager
def presses(*numbers: int) -> Iterator[None]:
    """Signals to this process, 1.3 s apart, the last one again two minutes later, until the block has ended."""
    ended, least = threading.Event(), max(2, len(numbers))

    def press() -> None:
        for count, number in enumerate(itertools.chain(numbers, itertools.repeat(numbers[-1])), 1):
            os.kill(os.getpid(), number)
            if ended.wait(1.3 if count < least else 120.0):
                return

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        yield
    finally:
        ended.set()
        pressing.join()


def test_a_second_signal_ends_what_has_time_to_save(termination: Termination) -> None:
    with pytest.raises(Terminated), termination.saves(120.0), presses(signal.SIGINT):
        threading.Event().wait(600)
    assert termination.finish() == 130


def test_requests_to_leave_may_be_many_and_come_before_a_signal(termination: Termination) -> None:
    """Signals as of several pods that go together, and of whoever deletes their job."""

    def asks() -> None:
        for number in (LEAVE, LEAVE, signal.SIGTERM, LEAVE):
            os.kill(os.getpid(), number)
            time.sleep(1.2)

    asking = threading.Thread(target=asks)
    with termination.saves(60.0):
        asking.start()
        while asking.is_alive():
            time.sleep(0.05)
        assert termination.stop_requested
        with pytest.raises(Terminated):
            termination.end_asked("saved")
    assert termination.finish() == 75


def test_a_second_sigterm_after_a_request_to_leave_is_impatience(termination: Termination) -> None:
    with pytest.raises(Terminated), termination.saves(120.0), presses(LEAVE, signal.SIGTERM, signal.SIGTERM):
        threading.Event().wait(600)
    assert termination.finish() == 143


def test_sigusr1_asks_once(termination: Termination, capfd: pytest.CaptureFixture[str]) -> None:
    with termination.saves(None):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [termination.take_save_request(), termination.take_save_request()] == [True, False]
        assert termination.cause is None
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert "SIGUSR1: the run saves a checkpoint after this step" in capfd.readouterr().err


def test_nothing_is_left_of_the_handlers(termination: Termination) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Termination().handled():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert not Termination().end("no command")


@pytest.mark.parametrize(
    ("work", "signals", "code", "within_s"),
    [
        # Deaf: handlers run in the main thread alone, which does not come back to the interpreter.
        ("libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)", 1, 143, 4),
        # Swallowed by a library.
        ("swallow()", 1, 143, 4),
        # Asked for twice.
        ("swallow(); time.sleep(60)", 2, 143, 2.5),
    ],
)
def test_what_does_not_end_in_order_is_ended_by_force(work: str, signals: int, code: int, within_s: float) -> None:
    grace_s = 30 if signals > 1 else 0.5
    program = f"""
        import ctypes, time
        from hybridflow.cluster.processes.termination import termination

        libc, mutex = ctypes.CDLL(None), (ctypes.c_ulong * 8)()

        def swallow():
            try:
                time.sleep(60)
            except BaseException:
                time.sleep(60)

        with termination.handled():
            termination.begin()
            termination.grace_s = {grace_s}
            print("ready", flush=True)
            {work}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)  # it is at its work then
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    if signals > 1:
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert out == ""
    assert err.startswith("hybridflow: terminated; what had not ended within ")
    assert len(err.splitlines()) == 1
    assert time.monotonic() - begin < within_s


def test_a_full_disk_hides_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hybridflow.trainer.run import write_timeline

    path = tmp_path / "timeline.json"
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # as on a full disk, no file grows
    try:
        with pytest.raises(EngineError, match="the first error") as caught:
            try:
                raise EngineError("the first error")
            finally:
                write_timeline(tmp_path)
        write_timeline(tmp_path)  # of a run that went well
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = f"hybridflow: {path} could not be written: File too large"
    assert caught.value.__notes__ == [line]
    assert capsys.readouterr().err == f"{line}\n"
