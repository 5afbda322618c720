"""The processors near a GPU, as Linux tells them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine3d.platform.cuda import near_processors
from engine3d.platform.cuda.near_processors import near, stay_near

GPU = "0000:1b:00.0"


def the_bus(directory: Path, processors: str) -> Path:
    (directory / GPU).mkdir()
    (directory / GPU / "local_cpulist").write_text(f"{processors}\n")
    return directory


@pytest.mark.parametrize(
    ("processors", "usable", "expected"),
    [
        ("0-31,64-95", range(128), [*range(32), *range(64, 96)]),
        ("0-31,64-95", range(28, 70), [28, 29, 30, 31, *range(64, 70)]),  # of a container that has some of them
        ("0,2,4,6,8", range(128), [0, 2, 4, 6, 8]),
        ("0-31", range(32, 64), range(32, 64)),  # of the other side alone
        ("0-31", range(29, 64), range(29, 64)),  # three of this side
        ("", range(8), range(8)),
    ],
)
def test_processors_on_the_side_of_a_device(
    tmp_path: Path, processors: str, usable: range, expected: list[int] | range
) -> None:
    assert near(GPU, set(usable), the_bus(tmp_path, processors)) == set(expected)


def test_without_a_word_of_the_host_all_are_near(tmp_path: Path) -> None:
    assert near(GPU, {0, 1, 2, 3, 4}, tmp_path) == {0, 1, 2, 3, 4}


def test_a_thread_and_those_that_it_starts_stay_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two processors")
    monkeypatch.setattr(near_processors, "_FEWEST", 1)
    chosen, affinities = min(usable), list[set[int]]()

    def work() -> None:
        stay_near(GPU, the_bus(tmp_path, str(chosen)))
        inner = threading.Thread(target=lambda: affinities.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert affinities == [{chosen}]
    assert os.sched_getaffinity(0) == usable
