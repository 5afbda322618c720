"""Progress of a call that takes long, and the rank that keeps it waiting, from what is seen of all ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.cluster.processes.rank_look import RankLook, RankPlace
from hybridflow.rundir.status.heartbeat import Heartbeat
from hybridflow.workers.watching.call_progress import (
    ProgressLimits,
    Standstill,
    Usage,
    amount_done,
    is_first_part,
    moving,
    standstill,
    starting_stage,
)

LIMITS = ProgressLimits(progress_s=40, compile_s=600)
ADDRESS = "10.0.0.11"


def look(
    role: str = "actor",
    rank: int = 0,
    *,
    method: str = "update",
    has_turn: bool = True,
    shards: int = 0,
    counts: bool = True,
    usual_s: float | None = 1.0,
    pause_s: float = 100.0,
    beat_age_s: float = 1.0,
    stopped: tuple[int, ...] = (),
) -> RankLook:
    """A rank that stands still in an update, but for what is said."""
    position = RankPlace(role, rank, "node", ADDRESS, 1000 + rank, "/logs/x.heartbeat")
    beat = Heartbeat(role, rank, "host-1", position.pid, method, has_turn, 0.0, shards, 0.0, usual_s, counts, 0.0)
    return RankLook(position, True, stopped, beat, beat_age_s, pause_s)


def counted(rank_look: RankLook, done: int, total: int, unit: str = "responses") -> RankLook:
    assert rank_look.beat is not None
    return replace(rank_look, beat=replace(rank_look.beat, done=done, total=total, unit=unit))


def test_ranks_move_while_each_at_work_does_parts() -> None:
    recent, still = look(shards=3, pause_s=5.0), look(rank=1, shards=3, pause_s=40.0)
    assert moving([recent], [], 30.0) == [recent]
    assert moving([recent, still], [], 30.0) == []  # one that hangs is not hidden by another that moves
    assert moving([look(shards=3, pause_s=5.0, beat_age_s=31.0)], [], 30.0) == []  # no heartbeat
    assert moving([look(shards=0, pause_s=5.0)], [], 30.0) == []  # has only begun
    assert moving([look(shards=3, pause_s=5.0, counts=False)], [], 30.0) == []
    assert moving([look(shards=3, pause_s=40.0, usual_s=25.0)], [], 30.0) != []  # has paused as long before


def test_a_stopped_process_anywhere_is_no_progress() -> None:
    assert moving([look(shards=3, pause_s=5.0, stopped=(4711,))], [], 30.0) == []
    assert moving([look(shards=3, pause_s=5.0)], [look("rollout", stopped=(4711,))], 30.0) == []


def test_where_no_awaited_rank_has_its_turn_others_count() -> None:
    waiting, other = look(has_turn=False), look("critic", shards=2, pause_s=1.0)
    assert moving([waiting], [other], 30.0) == [other]
    assert moving([waiting], [look("critic", shards=2, pause_s=50.0)], 30.0) == []
    assert moving([waiting], [], 30.0) == []


def test_only_the_first_call_without_a_part_may_compile() -> None:
    assert is_first_part([look(usual_s=None), look(rank=1, usual_s=None)])
    assert not is_first_part([look(usual_s=None, shards=1)])
    assert not is_first_part([look(usual_s=2.0)])
    assert not is_first_part([look(usual_s=None, has_turn=False)])


def test_responses_are_summed_over_engines_with_those_that_have_answered() -> None:
    busy = counted(look("rollout", method="generate"), 112, 512)
    answered = counted(look("rollout", rank=1, method=""), 512, 512)
    assert amount_done([busy, answered], "generate", since=0.0) == "624 of 1,024 responses"
    assert amount_done([busy, answered], "generate", since=1.0) == "112 of 512 responses"  # idle since before the call


def test_micro_batches_are_those_of_the_rank_that_is_ahead() -> None:
    ranks = [counted(look(shards=7), 0, 0, "micro-batches"), counted(look(rank=1, shards=8), 0, 0, "micro-batches")]
    assert amount_done(ranks, "update", since=0.0) == "8 micro-batches done"
    assert amount_done([counted(look(shards=1), 0, 0, "micro-batches")], "update", since=0.0) == "1 micro-batch done"
    assert amount_done([look(shards=1)], "update", since=0.0) == "1 part done"


def test_busy_processes_compute_or_read() -> None:
    before = Usage.of([replace(look(), cpu_s=3.0, read_bytes=10**9)], 100.0)
    assert Usage(110.0, 3.5, 10**9, 1).is_busy_since(before)  # a twentieth of a core, which others share
    assert not Usage(110.0, 3.5, 10**9, 2).is_busy_since(before)
    assert Usage(110.0, 3.1, 2 * 10**9, 1).is_busy_since(before)
    assert not Usage(110.0, 3.1, 10**9 + 1000, 1).is_busy_since(before)


@pytest.mark.slow
def test_all_that_was_started_counts_before_ranks_have_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        before = Usage.of_descendants(time.monotonic())
        deadline = time.monotonic() + 30
        while not (busy := Usage.of_descendants(time.monotonic()).is_busy_since(before)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        child.kill()
    assert busy


@pytest.mark.parametrize(
    ("log", "stage"),
    [
        ("", "engine 3: starting"),
        ("[x] Load weight begin. avail mem=20.12 GB\n", "engine 3: loading weights"),
        (
            "[x] Load weight begin.\nLoading safetensors checkpoint shards:  25% Completed | 4/16\r"
            "Loading safetensors checkpoint shards:  31% Completed | 5/16\n",
            "engine 3: loading weights, 31 %",
        ),
        ("Load weight end. elapsed=3 s\nCapture cuda graph begin. Wait\n", "engine 3: capturing CUDA graphs"),
        ("Load weight end. elapsed=3 s\nKV Cache is allocated. dtype\nmore\n", "engine 3: KV cache allocated"),
    ],
)
def test_the_stage_of_an_engine_comes_from_its_log(tmp_path: Path, log: str, stage: str) -> None:
    (tmp_path / "sglang-3.log").write_text(log)
    assert starting_stage(tmp_path, "rollout", [3, 4]) == stage
    assert starting_stage(tmp_path, "actor", [3]) == "starting"
    assert starting_stage(None, "rollout", [3]) == "starting"


def verdict_of(
    awaited: list[RankLook], others: list[RankLook] | None = None, silence_s: float = 50.0, **stopped: int
) -> Standstill | None:
    before = [(ADDRESS, pid) for pid in stopped.values()]
    return standstill(awaited, others or [], silence_s, LIMITS, before)


def test_nothing_before_the_limit_and_while_one_makes_progress() -> None:
    assert verdict_of([look(), look(rank=1)], silence_s=39.0) is None
    assert verdict_of([look(), look(rank=1, pause_s=3.0)]) is None
    assert verdict_of([look(), look(rank=1)]) is not None


def test_the_rank_with_the_fewest_parts_is_behind() -> None:
    verdict = verdict_of([look(shards=5), look(rank=1, shards=3, pause_s=60.0), look(rank=2, shards=5)])
    assert verdict is not None
    assert (verdict.location.rank, verdict.method) == (1, "update")
    assert verdict.reason.startswith("no progress since ")
    assert verdict.reason.endswith("(60 s, limits.progress_s); parts done: 3, by another rank: 5")


def test_of_equals_the_one_that_has_stood_still_for_longest() -> None:
    verdict = verdict_of([look(pause_s=60.0), look(rank=1, pause_s=70.0)])
    assert verdict is not None and verdict.location.rank == 1
    assert verdict.reason.endswith("parts done: 0")


def test_a_first_call_may_take_as_long_as_compiling_does() -> None:
    assert verdict_of([look(usual_s=None, pause_s=599.0)]) is None
    assert verdict_of([look(usual_s=None, pause_s=600.0)]) is not None


def test_a_call_may_pause_three_times_as_long_as_it_has_before() -> None:
    assert verdict_of([look(usual_s=30.0, pause_s=89.0)]) is None
    assert verdict_of([look(usual_s=30.0, pause_s=90.0)]) is not None


def test_work_without_parts_is_judged_by_heartbeats_alone() -> None:
    assert verdict_of([look(counts=False, pause_s=1000.0)]) is None
    verdict = verdict_of([look(counts=False, beat_age_s=41.0), look(rank=1, counts=False, beat_age_s=80.0)])
    assert verdict is not None and verdict.location.rank == 1 and verdict.reason.startswith("no heartbeat since ")


def test_a_stopped_process_comes_before_those_that_wait_for_it() -> None:
    """Its heartbeat says when, and a process that it has started has none."""
    verdict = verdict_of([look(shards=1), look(rank=1, shards=3, stopped=(1001,), beat_age_s=45.0)], a=1001)
    assert verdict is not None and verdict.location.rank == 1
    assert "process 1001 is stopped since " in verdict.reason and "(45 s, " in verdict.reason
    verdict = verdict_of([look(), look(rank=1, pause_s=0.0, stopped=(7, 8))], a=7, b=8)
    assert verdict is not None and "processes 7, 8 are stopped since " in verdict.reason and "(50 s, " in verdict.reason


def test_a_process_that_is_stopped_for_a_moment_is_no_cause() -> None:
    assert verdict_of([look(pause_s=1.0), look(rank=1, stopped=(1001,))]) is None
    # One whose heartbeat has been missing for as long is stopped, though nobody has looked before.
    verdict = verdict_of([look(), look(rank=1, stopped=(1001,), beat_age_s=600.0)])
    assert verdict is not None and verdict.reason.startswith("process 1001 is stopped since ")


def test_a_stopped_rank_is_the_cause_also_before_it_has_begun_its_call() -> None:
    verdict = verdict_of([look(method="", stopped=(1000,), beat_age_s=45.0), look(rank=1)], a=1000)
    assert verdict is not None and (verdict.location.rank, verdict.method) == (0, "")


def test_a_stopped_rank_of_another_group_counts_only_where_nobody_makes_progress() -> None:
    """A transfer of weights has ranks of two groups."""
    engine = look("rollout", 0, method="", stopped=(77,))
    assert verdict_of([look(pause_s=1.0)], [engine], a=77) is None
    verdict = verdict_of([look()], [engine], a=77)
    assert verdict is not None and verdict.location.role == "rollout"


def test_ranks_that_wait_for_input_or_turn_are_not_to_blame() -> None:
    waiting = [look(method=""), look(rank=1, has_turn=False)]
    rollout = look("rollout", 0, method="generate")
    assert verdict_of(waiting) is None
    assert verdict_of(waiting, [replace(rollout, pause_s=1.0)]) is None
    verdict = verdict_of(waiting, [rollout])
    assert verdict is not None and (verdict.location.role, verdict.method) == ("rollout", "generate")


def test_ranks_that_are_gone_are_left_to_those_who_miss_them() -> None:
    assert verdict_of([replace(look(), is_there=False)]) is None
