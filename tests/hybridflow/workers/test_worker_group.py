"""Worker groups on a real Ray: who gets which part of the data, and what a failing, dying or hanging rank leads to."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.rollout.host.log import root_cause
from engine3d.stacks import stacks_path
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import ResourcePool, cluster_nodes, release, reserve
from hybridflow.errors.rank_failure import Failure
from hybridflow.rundir.status.heartbeat import read_heartbeats
from hybridflow.workers.failure_diagnosis import error_of
from hybridflow.workers.future import as_they_answer
from hybridflow.workers.watching.call_progress import ProgressLimits
from hybridflow.workers.worker_group import Future, RankError, RankUserError, wait_together
from tests.support.called_group import CalledGroup
from tests.support.group_workers import FULL, Arithmetic, Failing

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pools(ray_cluster: None) -> Iterator[dict[str, ResourcePool]]:
    roles = {"four": "cpu:0-3", "two": "cpu:4-5", "shared": "cpu:2-3"}
    reserved = reserve(pool_devices(roles, {}, cluster_nodes()))
    yield reserved
    release(reserved)


@pytest.fixture(scope="module")
def group(pools: dict[str, ResourcePool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CalledGroup]:
    log_dir = tmp_path_factory.mktemp("logs")
    layout = Layout(tp=2, dp=2)
    with CalledGroup("actor", Arithmetic, pools["four"], layout, 3, log_dir=log_dir, call_timeout_s=300) as group:
        yield group


@pytest.fixture
def failing(pools: dict[str, ResourcePool], tmp_path: Path) -> Iterator[CalledGroup]:
    group = CalledGroup("critic", Failing, pools["two"], Layout(tp=2), log_dir=tmp_path, call_timeout_s=300)
    yield group
    group.shutdown()


def processes_of(group: CalledGroup) -> list[psutil.Process]:
    return list(group.ranks.processes)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_ranks_of_a_private_run_write_for_their_user_alone(pools: dict[str, ResourcePool], tmp_path: Path) -> None:
    """Also where their Ray was started before, as one that the run joins."""
    before = os.umask(0o077)
    try:
        with CalledGroup("critic", Arithmetic, pools["two"], Layout(tp=2), 3, log_dir=tmp_path / "new" / "logs"):
            written = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    finally:
        os.umask(before)
    assert len(written) > 3
    assert {entry.stat().st_mode & 0o777 for entry in written} == {0o600, 0o700}


def test_splits_over_dp_and_collects_one_rank_of_each_replica(group: CalledGroup) -> None:
    assert group.multiply([1, 2, 3, 4, 5], offset=1).result() == [4, 7, 10, 13, 16]
    assert group.where([1, 2, 3, 4, 5]).result() == [(0, (1, 2)), (2, (3, 4, 5))]


def test_blocking_methods_return_the_result(group: CalledGroup) -> None:
    rows = group.environment(["RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"])
    assert rows == [[str(rank), "4", str(rank), ""] for rank in range(4)]
    [[store]] = {tuple(names) for names in group.environment(["ENGINE3D_STORE"])}
    assert store.startswith(f"file://{Path(os.environ['RAY_AUTH_TOKEN_PATH']).parent}/")


def test_ranks_have_the_priority_of_the_driver(group: CalledGroup) -> None:
    assert {process.nice() for process in processes_of(group)} == {psutil.Process().nice()}


def test_one_entry_a_rank(group: CalledGroup) -> None:
    assert group.echo([10, 11, 12, 13]).result() == [(0, 10), (1, 11), (2, 12), (3, 13)]


def test_a_future_is_data_for_the_next_call(group: CalledGroup) -> None:
    first = group.multiply([1, 2, 3, 4])
    assert isinstance(first, Future)
    assert group.multiply(first).result() == [9, 18, 27, 36]
    assert group.echo(group.multiply([0, 1, 2, 3])).result() == [(0, 0), (1, 3), (2, 6), (3, 9)]


def test_some_ranks_are_called_by_themselves_and_answer_one_after_another(group: CalledGroup, tmp_path: Path) -> None:
    end = tmp_path / "end"
    slow, quick = group.call_some([3], "rest", end), group.call_some([0, 2], "rest")
    answers = as_they_answer([slow, quick])
    assert next(answers) == 1
    end.touch()
    assert list(answers) == [0]
    assert (slow.result(), quick.result()) == ([3], [0, 2])
    assert [(span.rank, span.method) for span in quick.spans] == [(0, "rest"), (2, "rest")]
    with pytest.raises(UserError, match=r"actor\.multiply: of some ranks, expected a method of ONE_TO_ALL"):
        group.call_some([0], "multiply", [1, 2])
    of_four = group.call_some([1, 2], "echo", [10, 11, 12, 13])
    assert of_four.result() == [(1, 11), (2, 12)]


def test_of_some_ranks_the_one_that_dies_is_named_and_ends_the_group(failing: CalledGroup) -> None:
    waiting = failing.call_some([0], "raise_on", 1)  # for long
    with pytest.raises(RankError, match="critic rank 1, die_on: the process died"):
        list(as_they_answer([waiting, failing.call_some([1], "die_on", 1)]))
    assert not failing.is_alive


def test_all_who_wait_are_told_what_the_first_has_met(failing: CalledGroup) -> None:
    calls = [failing.call_some([rank], "raise_on", 1) for rank in (0, 1)]  # the first for long
    results = []

    def wait(call: Future) -> None:
        with pytest.raises(RankError) as caught:
            call.wait()
        results.append(str(caught.value))

    with ThreadPoolExecutor() as threads:
        list(threads.map(wait, calls))
    with pytest.raises(RankError) as caught:
        failing.call_some([0], "raise_on", 0)
    assert len({*results, str(caught.value)}) == 1
    assert results[0].startswith("critic rank 1, raise_on: ")


def test_output_goes_to_one_file_a_rank(group: CalledGroup) -> None:
    for rank in range(4):
        path = group.ranks.log_path(rank)
        assert path is not None
        assert path.name == f"actor-{rank}.log"
        assert f"rank {rank} speaks" in path.read_text()


def test_data_that_cannot_be_split_is_refused_before_any_rank_sees_it(group: CalledGroup) -> None:
    with pytest.raises(UserError, match=r"actor\.multiply: cannot split 1 rows of data into 2 shards"):
        group.multiply([1])
    assert group.multiply([1, 2]).result() == [3, 6]


def test_only_registered_methods_are_offered(group: CalledGroup) -> None:
    with pytest.raises(AttributeError, match="no registered method 'private'; registered are echo, environment"):
        _ = group.private


def test_a_pool_of_another_size_is_refused(pools: dict[str, ResourcePool]) -> None:
    with pytest.raises(UserError, match=r"actor: the layout \(tp=2 dp=2\) has 4 ranks, and its pool has 2 devices"):
        CalledGroup("actor", Arithmetic, pools["two"], Layout(tp=2, dp=2), 3)


def test_pipeline_stages_and_groups_that_share_devices(pools: dict[str, ResourcePool], group: CalledGroup) -> None:
    with CalledGroup("reference", Arithmetic, pools["shared"], Layout(pp=2), 5, call_timeout_s=300) as other:
        assert other.stage().result() == [0, 1]
        assert other.where([1, 2]).result() == [(1, (1, 2))]
        # dp 2 into dp 1: the caller joins what the ranks cannot pass on as it is
        assert other.multiply(group.multiply([1, 2])).result() == [15, 30]
        processes = processes_of(other)
    assert all_gone(processes)


def test_a_rank_that_raises_ends_the_group_at_once(failing: CalledGroup) -> None:
    processes = processes_of(failing)
    with pytest.raises(RankError) as caught:
        failing.raise_on(1).result()
    line = str(caught.value)
    assert line.startswith("critic rank 1, raise_on: ValueError: sample 17 has no response tokens (log: ")
    assert "\n" not in line
    assert caught.value.failure is not None
    assert 'raise ValueError("sample 17' in caught.value.failure.stack
    assert all_gone(processes)
    with pytest.raises(RankError, match="critic rank 1, raise_on: ValueError"):
        failing.identity([1])


def test_a_rank_without_gpu_memory_says_how_much_it_wanted_and_what_to_change(failing: CalledGroup) -> None:
    with pytest.raises(RankError) as caught:
        failing.fill_on(1).result()
    assert str(caught.value).startswith(
        "critic rank 1, fill_on: GPU out of memory: tried to allocate 1.95 GiB with 1.58 GiB of 139.81 GiB free "
        "(process 2493055 has 12.02 GiB in use, this process has 126.20 GiB in use, 120.07 GiB in tensors here, "
        '33.93 MiB reserved unused); see "hybridflow check RECIPE --memory"; to need less: a smaller '
        "train.micro_batch_tokens, train.recompute=full"
    )
    assert str(caught.value).endswith("critic-1.log)") and "\n" not in str(caught.value)


def test_an_engine_without_gpu_memory_names_its_own_settings(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"Scheduler hit an exception: Traceback (most recent call last):\ntorch.OutOfMemoryError: {FULL}\n")
    died = f"EngineError: rollout engine died during generate: its process ended with 1 after: {root_cause(log)}"
    error = error_of(Failure("rollout", 0, "generate", died, user_error=False, time=0.0, stack=""), log)
    assert "ended with 1 after: GPU out of memory: tried to allocate 1.95 GiB with 1.58 GiB of 139.81 GiB" in str(error)
    assert "33.93 MiB reserved unused); see" in str(error) and "PYTORCH" not in str(error)
    assert "to need less: a smaller rollout.engine.mem_fraction_static" in str(error)


def test_calls_that_wait_for_one_another_end_with_the_first_cause(
    pools: dict[str, ResourcePool], failing: CalledGroup
) -> None:
    with CalledGroup("actor", Failing, pools["shared"], Layout(tp=2), call_timeout_s=300) as other:
        processes = processes_of(other)
        with pytest.raises(RankError, match="critic rank 1, raise_on: ValueError"):
            wait_together(other.hang_on(0), failing.raise_on(1))
        assert all_gone(processes)


def test_a_user_error_stays_one_and_outranks_a_lost_neighbour(failing: CalledGroup) -> None:
    with pytest.raises(RankUserError) as caught:
        failing.refuse_on(1).result()
    assert str(caught.value) == "critic rank 1, refuse_on: prompt 3 has 40 tokens, the context holds 32"


def test_a_killed_rank_is_the_cause_not_its_neighbours_gloo_error(failing: CalledGroup) -> None:
    processes = processes_of(failing)
    with pytest.raises(RankError, match="critic rank 1, die_on: the process died without a word"):
        failing.die_on(1).result()
    assert all_gone(processes)


def test_a_rank_that_exits_and_what_it_had_started(failing: CalledGroup) -> None:
    children = [psutil.Process(pid) for pid in failing.start_child().result()]
    processes = processes_of(failing)
    with pytest.raises(RankError, match="critic rank 0, exit_on: the process died"):
        failing.exit_on(0).result()
    assert all_gone([*processes, *children])


def test_a_rank_that_hangs_meets_the_limit_and_shows_its_stack(failing: CalledGroup) -> None:
    processes = processes_of(failing)
    with pytest.raises(RankError) as caught:
        failing.hang_on(1).result(timeout_s=2)
    assert str(caught.value).startswith(
        "critic rank 1, hang_on: no answer within 2 s; the stacks of its threads are in "
    )
    path = failing.ranks.log_path(1)
    assert path is not None
    assert "_wait_for_nobody" in stacks_path(path).read_text()
    assert all_gone(processes)


def test_a_rank_that_stands_still_is_named_before_the_limit(
    pools: dict[str, ResourcePool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = ""
    stacks = [tmp_path / name for name in ("critic-0.stacks", "critic-1.stacks", "driver.stacks")]

    def resume_once_it_is_named() -> None:
        nonlocal printed
        deadline = time.monotonic() + 120
        while "no answer since" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capfd.readouterr().err
        time.sleep(1.6)  # in which it is not named again
        stopped.resume()

    with CalledGroup("critic", Failing, pools["two"], Layout(tp=2), log_dir=tmp_path, quiet_s=3) as group:
        assert group.identity([1, 2]).result() == [1, 2]
        capfd.readouterr()  # of a start that takes long on a busy machine
        stopped = group.ranks.processes[1]
        stopped.suspend()
        requested = group.identity([1, 2])
        with ThreadPoolExecutor(1) as pool:
            resumed = pool.submit(resume_once_it_is_named)
            assert requested.result() == [1, 2]
            resumed.result()
        deadline = time.monotonic() + 60
        while not all(path.exists() and "most recent call first" in path.read_text() for path in stacks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    lines = [line for line in (printed + capfd.readouterr().err).splitlines() if "no answer since" in line]
    assert len(lines) == 1
    line = r"hybridflow: .*: critic rank 1, identity: no answer since [\d:]+ \(\d+ s\); process (\d+) of critic is st"
    result = re.match(line, lines[0])
    assert result is not None, lines
    assert int(result[1]) == stopped.pid


def test_a_slow_call_reports_its_progress_and_no_warning(
    pools: dict[str, ResourcePool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with CalledGroup("critic", Failing, pools["two"], Layout(tp=2), log_dir=tmp_path, quiet_s=5) as group:
        capfd.readouterr()  # of a start that takes long on a busy machine
        group.do_rounds([14, 14], 0.5).result()
    said = capfd.readouterr()
    # The phase before it is that of the process: another test may have set one.
    assert re.search(r"^.+: critic: \d+ parts done, \d+ s$", said.out, re.MULTILINE), said.out
    assert "no answer since" not in said.err
    assert not list(tmp_path.glob("driver.stacks"))


def test_a_call_that_comes_no_further_ends_with_the_rank_that_is_behind(
    pools: dict[str, ResourcePool], tmp_path: Path
) -> None:
    limits = ProgressLimits(progress_s=1, compile_s=60)
    with CalledGroup("critic", Failing, pools["two"], Layout(tp=2), log_dir=tmp_path, progress=limits) as group:
        group.do_rounds([2, 2], 1.5).result()  # slower than allowed, as the first call may be
        group.do_rounds([2, 2], 1.5).result()  # and as long as one before
        processes = processes_of(group)
        with pytest.raises(RankError) as caught:
            group.do_rounds([3, 1], 0.1).result()
    line = (
        r"critic rank 1, do_rounds: no progress since [\d:]+ \(\d+ s, limits.progress_s\); parts done: 1, by another "
    )
    assert re.match(line, str(caught.value)), caught.value
    assert "_wait_for_nobody" in (tmp_path / "critic-1.stacks").read_text()
    assert "do_rounds" in (tmp_path / "critic-0.stacks").read_text()
    assert all_gone(processes)


def test_a_rank_that_is_stopped_ends_its_call_and_shows_its_stack(
    pools: dict[str, ResourcePool], tmp_path: Path
) -> None:
    limits = ProgressLimits(progress_s=1, compile_s=60)
    with CalledGroup("critic", Failing, pools["two"], Layout(tp=2), log_dir=tmp_path, progress=limits) as group:
        stopped = group.ranks.processes[0]
        stopped.suspend()
        with pytest.raises(RankError) as caught:
            group.identity([1, 2]).result()
    line = (
        rf"critic rank 0, identity: process {stopped.pid} is stopped since [\d:]+ \(\d+ s, limits.progress_s\), as by "
    )
    assert re.match(line, str(caught.value)), caught.value
    assert "most recent call first" in (tmp_path / "critic-0.stacks").read_text()


def test_ranks_that_are_called_after_a_failure_of_others_give_signs_of_life_again(
    group: CalledGroup, failing: CalledGroup
) -> None:
    with pytest.raises(RankError):
        failing.lose([1, 2]).result()
    group.multiply([1, 2, 3, 4], offset=1).result()
    begin, log_dir = time.time(), group.ranks.log_dir
    assert log_dir is not None
    while min(beat.at for beat in read_heartbeats(log_dir)) < begin:
        assert time.time() - begin < 300
        time.sleep(0.1)
    assert len(read_heartbeats(log_dir)) == 4


def test_a_failed_input_is_named_by_the_rank_that_should_have_made_it(pools: dict[str, ResourcePool]) -> None:
    failing = CalledGroup("critic", Failing, pools["two"], Layout(dp=2))
    group = CalledGroup("actor", Arithmetic, pools["shared"], Layout(dp=2), 3)
    chained = group.multiply(failing.lose([1, 2]), offset=1)
    with pytest.raises(RankError, match="critic rank 1, lose: ValueError: no number here"):
        chained.result()


def test_a_worker_that_cannot_be_built_is_named(pools: dict[str, ResourcePool]) -> None:
    message = r"^critic rank 1, start: config\.json of model /no/such: no key hidden_size$"
    with pytest.raises(RankUserError, match=message):
        CalledGroup("critic", Failing, pools["two"], Layout(dp=2), fail_at_start=1)


def test_shutdown_leaves_no_process(pools: dict[str, ResourcePool]) -> None:
    group = CalledGroup("critic", Failing, pools["two"], Layout(dp=2))
    children = [psutil.Process(pid) for pid in group.start_child().result()]
    processes = processes_of(group)
    group.shutdown()
    assert all_gone([*processes, *children])
    group.shutdown()
