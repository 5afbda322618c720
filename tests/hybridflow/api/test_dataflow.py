"""Graphs of stages: what is refused before anything starts, and what a run of real ranks makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow import DataFlow, Stage
from hybridflow.api.dataflow import device_maps
from hybridflow.workers.failure_diagnosis import RankError
from tests.support.stage_modules import Plain, Ranked, Waits, add, numbers


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"name": ""}, "stage '': expected a name that is a text and not empty"),
        ({"num_workers": 0}, "stage one: num_workers=0, expected at least 1"),
        ({"num_workers": 1, "device_mapping": "cpu:0"}, "num_workers and device_mapping, expected one of them"),
        ({"device_mapping": "gpu:0"}, "stage one: device map 'gpu:0': the kind is 'gpu'"),
        ({"module": 3}, "stage one: module is a int, expected a function, a class with __call__, or a worker class"),
        ({"module": Plain}, "stage one: module is the class Plain, expected"),
        ({"module": Ranked}, "stage one: method is not given, expected one of other, process"),
        ({"module": Ranked, "method": "no"}, "stage one: no registered method 'no'; registered are other, process"),
        ({"method": "no"}, "stage one: no registered method 'no'; registered are none"),
    ],
)
def test_a_stage_that_makes_no_sense_gives_one_line(arguments: dict[str, Any], line: str) -> None:
    given: dict[str, Any] = {"name": "one", "module": add} | arguments
    assert line in refusal(lambda: Stage(**given))


def test_connections_that_make_no_sense_give_one_line() -> None:
    flow = DataFlow()
    first, second, third = (Stage(name=name, module=add) for name in ("a", "b", "c"))
    assert "flow: no stage in it" in refusal(flow.run)
    flow.connect(first, second)
    flow.connect(second, third)
    assert refusal(lambda: flow.connect(third, first)) == (
        "flow: c -> a makes a cycle, a -> b -> c -> a; expected none"
    )
    assert "flow: b -> b makes a cycle, b -> b" in refusal(lambda: flow.connect(second, second))
    assert refusal(lambda: flow.connect("a", "d")) == "flow: no stage is called 'd'; there are a, b, c"
    assert refusal(lambda: flow.connect("a", "b")) == "flow: a is connected to b already"
    other = Stage(name="a", module=add)
    assert refusal(lambda: flow.add(other)) == "flow: two stages are called a, expected each name once"
    assert "is a int, expected a Stage" in refusal(lambda: flow.connect(first, 3))  # type: ignore[arg-type]
    assert refusal(lambda: flow.run(max_steps=0)) == "flow: max_steps=0, expected at least 1"


def test_stages_get_cpu_slots_of_their_own() -> None:
    stages = [
        Stage(name="a", module=add, num_workers=2),
        Stage(name="b", module=add, device_mapping="cpu:1-2"),
        Stage(name="c", module=add, num_workers=3),
        Stage(name="d", module=add),
    ]
    assert device_maps(stages) == {"a": "cpu:3-4", "b": "cpu:1-2", "c": "cpu:5-7", "d": "cpu:8-8"}


@pytest.mark.processes
def test_data_goes_along_the_connections(ray_cluster: None, tmp_path: Path) -> None:
    """A source, two stages that run at the same time, one that joins them, and a worker class of two ranks."""
    flow = DataFlow()
    source = Stage(name="source", module=numbers, num_workers=1, log_dir=tmp_path)
    slow = [Stage(name=name, module=Waits, log_dir=tmp_path) for name in ("slow", "slower")]
    ranked = Stage(name="ranked", module=Ranked, num_workers=2, method="process", log_dir=tmp_path)
    doubled = Stage(name="doubled", module=lambda first: [2 * value for value in first], log_dir=tmp_path)
    total = Stage(name="total", module=add, log_dir=tmp_path)
    for stage in (*slow, ranked, doubled):
        flow.connect(source, stage)
    flow.connect(doubled, total)
    flow.connect("source", "total")
    results = flow.run(max_steps=2)
    assert [set(step) for step in results] == [{"slow", "slower", "ranked", "total"}] * 2
    for number, step in enumerate(results, start=1):
        made = numbers(number)
        assert step["total"] == [3 * value for value in made]
        assert step["ranked"] == [(index // 2, number, value) for index, value in enumerate(made)]
        (begin, end), (other_begin, other_end) = step["slow"][0], step["slower"][0]
        assert max(begin, other_begin) < min(end, other_end)


@pytest.mark.processes
def test_a_stage_that_fails_is_named(ray_cluster: None, tmp_path: Path) -> None:
    flow = DataFlow()
    source = Stage(name="source", module=numbers, log_dir=tmp_path)
    flow.connect(source, Stage(name="broken", module=lambda batch: batch[9], log_dir=tmp_path))
    with pytest.raises(RankError, match=r"^broken rank 0, process: IndexError: list index out of range"):
        flow.run()
    beyond = Stage(name="far", module=numbers, device_mapping="cuda:64")
    alone = DataFlow()
    alone.add(beyond)
    assert refusal(alone.run).startswith("stage far: ")
