"""Groups on devices of their own compute at the same time; groups that share one do so in the order of their calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from engine3d.layout import Layout
from engine3d.stacks import stacks_path
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.metrics.timeline import TimelineSpan, timeline
from hybridflow.workers.worker_group import Future, RankError
from tests.support.called_group import CalledGroup
from tests.support.group_workers import Computing, batch_of

pytestmark = pytest.mark.processes

DEVICES = {
    "reference": "cpu:0",
    "reward": "cpu:1",
    "critic": "cpu:2",
    "second_reward": "cpu:0",
    "second_critic": "cpu:0",
    "dies": "cpu:0,3",
    "hangs": "cpu:0",
    "keeps": "cpu:0",
}
APART = ("reference", "reward", "critic")
TOGETHER = ("second_critic", "reference", "second_reward")  # neither in the order of their start nor of their names


@pytest.fixture(scope="module")
def groups(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CalledGroup]]:
    pools = reserve(pool_devices(DEVICES, {}, cluster_nodes()))
    log_dir = tmp_path_factory.mktemp("logs")

    def start(role: str) -> CalledGroup:
        layout = Layout(dp=len(pools[role]))
        return CalledGroup(role, Computing, pools[role], layout, log_dir=log_dir, call_timeout_s=300)

    with ThreadPoolExecutor() as threads:
        made = dict(zip(pools, threads.map(start, pools), strict=True))
    batch = RemoteBatch.of(batch_of(range(2), 5))
    for future in [group.compute(batch, factor=1) for group in made.values()]:  # what they import on their first call
        future.wait()
    yield made
    for group in made.values():
        group.shutdown()
    release(pools)


def compute(
    groups: dict[str, CalledGroup], roles: tuple[str, ...], batch: RemoteBatch, end: Path, at_once: int
) -> list[Future]:
    """One call of each role, all made before one may end: that is when `at_once` of them have begun."""
    futures: list[Future] = [
        groups[role].compute(batch, factor=factor, until=end) for factor, role in enumerate(roles, start=2)
    ]
    while len(list(end.parent.glob(f"{end.name}.*"))) < at_once:
        assert not any(future.done() for future in futures)
        time.sleep(0.01)
    end.touch()
    for future in futures:
        future.wait()
    return futures


def times(factor: int, batch: RemoteBatch) -> list[list[int]]:
    """Multiply each response token of a batch by `factor`, as `compute` does."""
    return [[factor * token for token in response] for response in batch.fetch().responses()]


def test_roles_overlap_on_pools_of_their_own_and_take_turns_on_one(
    groups: dict[str, CalledGroup], tmp_path: Path
) -> None:
    batch = RemoteBatch.of(batch_of(range(6), 5))
    apart = compute(groups, APART, batch, tmp_path / "apart", at_once=len(APART))
    together = compute(groups, TOGETHER, batch, tmp_path / "together", at_once=1)

    spans: list[TimelineSpan] = [future.spans[0] for future in apart]
    assert [(span.role, span.rank, span.method) for span in spans] == [(role, 0, "compute") for role in APART]
    assert max(span.begin for span in spans) < min(span.end for span in spans)
    turns = [future.spans[0] for future in together]
    assert [span.role for span in turns] == list(TOGETHER)
    assert all(former.end <= latter.begin for former, latter in pairwise(turns))

    for factor, one, other in zip((2, 3, 4), apart, together, strict=True):
        assert one.result() == other.result() == times(factor, batch)

    assert {*spans, *turns} <= set(timeline.spans)
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {*APART, *TOGETHER} <= {event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_only_exclusive_methods_wait(groups: dict[str, CalledGroup], tmp_path: Path) -> None:
    slow = groups["reference"].compute(RemoteBatch.of(batch_of(range(2), 5)), factor=2, until=tmp_path / "end")
    assert len(groups["second_reward"].offloads().result()) == 1
    assert not slow.done()
    (tmp_path / "end").touch()
    slow.wait()


def test_a_group_gives_memory_back_when_the_turn_goes_to_another(groups: dict[str, CalledGroup]) -> None:
    batch = RemoteBatch.of(batch_of(range(2), 5))

    def offloads() -> dict[str, list[int]]:
        return {role: groups[role].offloads().result() for role in ("dies", "reference", "critic")}

    def more_than(before: dict[str, list[int]], **more: int) -> dict[str, list[int]]:
        return {role: [count + more.get(role, 0) for count in counts] for role, counts in before.items()}

    groups["reference"].compute(batch, factor=1).wait()  # nobody else holds memory of its device
    before = offloads()
    groups["reference"].compute(batch, factor=1).wait()
    groups["critic"].compute(batch, factor=1).wait()
    assert offloads() == before  # the turn was nobody else's
    groups["dies"].compute(batch, factor=1).wait()
    assert offloads() == more_than(before, reference=1)
    groups["second_reward"].compute(batch, factor=1).wait()
    assert offloads() == more_than(before, reference=1, dies=1)  # each of its ranks, and the reference no more
    last = groups["reference"].compute(batch, factor=1)
    last.wait()
    [giving] = [span for span in timeline.spans if span.role == "second_reward" and span.method == "offload"][-1:]
    assert giving.end <= last.spans[0].begin


def test_a_group_takes_back_what_it_gave_before_its_next_turn_alone(groups: dict[str, CalledGroup]) -> None:
    batch = RemoteBatch.of(batch_of(range(2), 5))
    groups["dies"].compute(batch, factor=1).wait()
    groups["reference"].compute(batch, factor=1).wait()
    before = {role: groups[role].onloads().result() for role in ("dies", "reference")}
    groups["reference"].compute(batch, factor=1).wait()  # it has what it needs
    again = groups["dies"].compute(batch, factor=1)
    again.wait()
    after = {role: groups[role].onloads().result() for role in ("dies", "reference")}
    assert after == before | {"dies": [count + 1 for count in before["dies"]]}
    (giving,) = [span for span in timeline.spans if (span.role, span.method) == ("reference", "offload")][-1:]
    (taking,) = [span for span in timeline.spans if (span.role, span.method) == ("dies", "onload")][-1:]
    (computing,) = [span for span in again.spans if span.rank == taking.rank]
    assert giving.end <= taking.begin and taking.end <= computing.begin


def test_memory_that_is_not_given_back_is_told_also_after_the_turn_that_it_let_in(
    groups: dict[str, CalledGroup],
) -> None:
    batch = RemoteBatch.of(batch_of(range(2), 5))
    groups["keeps"].keep().wait()
    groups["keeps"].compute(batch, factor=1).wait()
    after = groups["second_reward"].compute(batch, factor=2)
    while not after.done():
        time.sleep(0.05)
    with pytest.raises(RankError, match=r"^keeps rank 0, offload: .*no room in host memory"):
        after.wait()
    assert not groups["keeps"].is_alive and groups["second_reward"].is_alive


def test_a_turn_ends_with_its_call_however_that_ends_and_the_cause_is_told(groups: dict[str, CalledGroup]) -> None:
    batch = RemoteBatch.of(batch_of(range(2), 5))
    groups["dies"].compute(batch, factor=1).wait()  # which brings its memory to the device
    dies = groups["dies"].die_on(1)  # its rank 0 goes on
    waits = groups["second_reward"].compute(batch, factor=2)
    with pytest.raises(RankError, match=r"^dies rank 1, die_on: the process died"):
        waits.result()
    assert waits.result() == times(2, batch)  # it was its turn then
    with pytest.raises(RankError, match=r"^dies rank 1, die_on: the process died"):
        dies.wait()

    hangs = groups["hangs"].hang()
    with pytest.raises(RankError) as caught:
        groups["second_critic"].compute(batch, factor=2).result(timeout_s=2)
    log = groups["hangs"].ranks.log_path(0)
    assert log is not None
    assert str(caught.value) == (
        "second_critic rank 0, compute: no turn within 2 s, since hangs rank 0, hang has not ended; "
        f"the stacks of its threads are in {stacks_path(log)}"
    )
    assert "_wait_for_nobody" in stacks_path(log).read_text()
    assert groups["hangs"].is_alive and not hangs.done()  # it may only be slow
    waits = groups["second_reward"].compute(batch, factor=2)
    groups["hangs"].kill()
    assert waits.result() == times(2, batch)
