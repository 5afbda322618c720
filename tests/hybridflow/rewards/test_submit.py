"""Rewards beside the driver's work: workers at the same time, results when asked for, and nothing left over."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import PendingRewards, RewardFunctions
from hybridflow.rewards.processes.handle import KilledError, RewardInputs, RewardProcess
from tests.hybridflow.rewards.test_failures import evaluated, function
from tests.hybridflow.rewards.test_functions import SPAWNS, gone, process_ids, wait_until

pytestmark = pytest.mark.processes

TOGETHER = """
import os, time
from pathlib import Path
FOLDER = Path(__file__).parent
def reward(texts):
    started = time.monotonic()
    (FOLDER / f"{os.getpid()}.started").touch()
    while len(list(FOLDER.glob("*.started"))) < 2 and time.monotonic() < started + 20: time.sleep(0.01)
    (FOLDER / f"{os.getpid()}.interval").write_text(f"{started} {time.monotonic()}")
    return [os.getpid()] * len(texts)
"""


def test_two_workers_run_at_the_same_time(tmp_path: Path) -> None:
    pids = evaluated(["a", "b"], function(tmp_path, source=TOGETHER, workers=2)).total.tolist()
    assert pids[0] != pids[1]
    intervals = [(tmp_path / f"{pid:.0f}.interval").read_text().split() for pid in pids]
    (first_start, first_end), (second_start, second_end) = [map(float, interval) for interval in intervals]
    assert max(first_start, second_start) < min(first_end, second_end)


GATE = """
import time
from pathlib import Path
def reward(texts):
    while not Path(__file__).with_name("gate").exists(): time.sleep(0.01)
    return [len(text) for text in texts]
"""


def test_submit_returns_at_once_and_the_work_goes_on_without_the_driver(tmp_path: Path) -> None:
    mine = function(tmp_path, source=GATE)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        pending = rewards.submit(["a", "bb"], ["", ""], ["", ""])
        with pytest.raises(RuntimeError, match="a batch is scored, or its result was not taken"):
            rewards.load()
        assert not pending.done()
        (tmp_path / "gate").touch()
        wait_until(pending.done, 20, "the rewards are there")
        assert pending.result().total.tolist() == [1.0, 2.0]
        assert pending.result() is pending.result()
        assert rewards.evaluate(["ccc"], [""], [""]).total.tolist() == [3.0]


SLOW_AND_QUICK = """
import time
from pathlib import Path
def reward(texts):
    if "slow" in texts:
        while not Path(__file__).with_name("gate").exists(): time.sleep(0.01)
    if "bad" in texts: raise ValueError("bad text")
    return [len(text) for text in texts]
"""


def test_batches_share_the_workers_and_a_slow_call_keeps_one_of_them(tmp_path: Path) -> None:
    mine = function(tmp_path, source=SLOW_AND_QUICK, workers=2)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        slow = rewards.submit(["slow", "a"], ["", ""], ["", ""])
        for texts in (["bb", "ccc"], ["dddd"]):
            assert rewards.evaluate(texts, [""] * len(texts), [""] * len(texts)).total.tolist() == list(map(len, texts))
        both = rewards.submit(["slow"], [""], [""]), rewards.submit(["eeeee"], [""], [""])
        time.sleep(0.3)
        assert not slow.done() and not any(pending.done() for pending in both)  # every worker has a slow one
        (tmp_path / "gate").touch()
        assert [pending.result().total.tolist() for pending in (slow, *both)] == [[4.0, 1.0], [4.0], [5.0]]


def test_an_error_of_one_batch_is_that_of_all_beside_it_and_the_next_starts_anew(tmp_path: Path) -> None:
    mine = function(tmp_path, source=SLOW_AND_QUICK, workers=2)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        slow = rewards.submit(["slow", "a"], ["", ""], ["", ""])
        bad = rewards.submit(["bad"], [""], [""])
        wait_until(lambda: bad.done() and slow.done(), 20, "both have failed")
        late = rewards.submit(["b"], [""], [""])
        errors = [raised(bad), raised(late), raised(slow)]
        assert len(set(map(str, errors))) == 1 and "bad text" in str(errors[0])
        assert rewards.evaluate(["ccc"], [""], [""]).total.tolist() == [3.0]
        assert raised(late) is errors[1]


def raised(pending: PendingRewards) -> BaseException:
    with pytest.raises(UserError) as caught:
        pending.result()
    return caught.value


def test_an_error_of_a_submit_is_raised_by_its_result_each_time(tmp_path: Path) -> None:
    mine = function(tmp_path)
    with RewardFunctions(RewardConfig(functions=(mine,))) as rewards:
        pending = rewards.submit(["raise"], [""], [""])
        wait_until(pending.done, 20, "the failure is there")
        for _ in range(2):
            with pytest.raises(UserError, match="bad text"):
                pending.result()
        after = rewards.submit(["a"], [""], [""])
        with pytest.raises(UserError, match="bad text"):  # of the first, which ends nothing of the second
            pending.result()
        assert after.result().total.tolist() == [1.0]


def hanging(tmp_path: Path, marker: Path) -> RewardFunctions:
    source = SPAWNS.format(marker=str(marker), hang="time.sleep(600)")
    mine = function(tmp_path, source=source, timeout_s=600, on_failure="value")
    return RewardFunctions(RewardConfig(functions=(mine,)))


def test_close_leaves_nothing_of_a_call_that_hangs(tmp_path: Path) -> None:
    marker, threads = tmp_path / "marker", threading.active_count()
    rewards = hanging(tmp_path, marker)
    pending = rewards.submit(["a", "b"], ["", ""], ["", ""])
    pids = process_ids(marker)
    assert not any(map(gone, pids))
    started = time.monotonic()
    rewards.close()
    assert pending.done()
    assert time.monotonic() - started < 300
    wait_until(lambda: all(map(gone, pids)), 30, "the reward process and its child have ended")
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="closed before"):
        pending.result()
    (tmp_path / "mine.py").write_text("def reward(texts): return [len(text) for text in texts]")
    with rewards:
        after = rewards.submit(["a", "b"], ["", ""], ["", ""])
        with pytest.raises(RuntimeError, match="closed before"):
            pending.result()
        assert after.result().total.tolist() == [1.0, 1.0]


def test_close_while_a_function_is_imported_leaves_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    spawns = SPAWNS.format(marker=str(marker), hang="time.sleep(600)") + "\nreward([])"
    rewards = RewardFunctions(RewardConfig(functions=(function(tmp_path, source=spawns, on_failure="value"),)))
    rewards.submit(["a", "b"], ["", ""], ["", ""])
    pids = process_ids(marker)
    rewards.close()
    wait_until(lambda: all(map(gone, pids)), 30, "the reward process and its child have ended")


def test_a_process_that_was_killed_does_not_start_before_it_is_closed(tmp_path: Path) -> None:
    process = RewardProcess(function(tmp_path))
    try:
        process.kill()
        with pytest.raises(KilledError):
            process.load()
        assert not process.running
        process.close()
        process.load()
        texts = ["a", "bb", "ccc"]
        assert process.call(RewardInputs(texts, texts, texts), range(1, 3), 30.0).values == [2.0, 3.0]
    finally:
        process.close()


def test_close_ends_a_process_that_left_the_group(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    # A daemon of the function's, with the connection that it was forked with.
    hang = """if os.fork() == 0:
        os.setsid()
        Path({marker!r}).write_text(f"{{os.getppid()}} {{os.getpid()}}")
    time.sleep(600)"""
    source = "import os, time\nfrom pathlib import Path\ndef reward(texts):\n    " + hang.format(marker=str(marker))
    rewards = RewardFunctions(RewardConfig(functions=(function(tmp_path, source=source),)))
    rewards.submit(["a"], [""], [""])
    worker, daemon = process_ids(marker)
    started = time.monotonic()
    rewards.close()
    assert time.monotonic() - started < 300
    assert gone(worker) and gone(daemon)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def interrupt() -> None:
        process_ids(marker)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without
    try:
        with hanging(tmp_path, marker) as rewards:
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                rewards.evaluate(["a"], [""], [""])
            thread.join()
            wait_until(lambda: all(map(gone, process_ids(marker))), 30, "the reward process and its child have ended")
    finally:
        signal.signal(signal.SIGINT, before)
