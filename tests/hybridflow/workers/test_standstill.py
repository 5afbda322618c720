"""Which rank keeps a call waiting, from what is seen of all ranks."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.cluster.processes.rank_look import RankLook, RankPlace, looks_as_json, looks_from_json
from hybridflow.rundir.heartbeat import Heartbeat
from hybridflow.workers.standstill import ProgressLimits, Standstill, standstill

LIMITS = ProgressLimits(progress_s=40, compile_s=600)
ADDRESS = "10.0.0.11"


def look(
    role: str = "actor",
    rank: int = 0,
    *,
    method: str = "update",
    has_turn: bool = True,
    parts: int = 0,
    counts: bool = True,
    usual_s: float | None = 1.0,
    pause_s: float = 100.0,
    beat_age_s: float = 1.0,
    stopped: tuple[int, ...] = (),
) -> RankLook:
    """A rank that stands still in an update, but for what is said."""
    place = RankPlace(role, rank, "node", ADDRESS, 1000 + rank, "/logs/x.heartbeat")
    beat = Heartbeat(role, rank, "host-1", place.pid, method, has_turn, 0.0, parts, 0.0, usual_s, counts, 0.0)
    return RankLook(place, True, stopped, beat, beat_age_s, pause_s)


def found(
    awaited: list[RankLook], others: list[RankLook] | None = None, silence_s: float = 50.0, **stopped: int
) -> Standstill | None:
    before = [(ADDRESS, pid) for pid in stopped.values()]
    return standstill(awaited, others or [], silence_s, LIMITS, before)


def test_nothing_before_the_limit_and_while_one_makes_progress() -> None:
    assert found([look(), look(rank=1)], silence_s=39.0) is None
    assert found([look(), look(rank=1, pause_s=3.0)]) is None
    assert found([look(), look(rank=1)]) is not None


def test_the_rank_with_the_fewest_parts_is_behind() -> None:
    verdict = found([look(parts=5), look(rank=1, parts=3, pause_s=60.0), look(rank=2, parts=5)])
    assert verdict is not None
    assert (verdict.place.rank, verdict.method) == (1, "update")
    assert verdict.reason.startswith("no progress since ")
    assert verdict.reason.endswith("(60 s, limits.progress_s); parts done: 3, by another rank: 5")


def test_of_equals_the_one_that_has_stood_still_for_longest() -> None:
    verdict = found([look(pause_s=60.0), look(rank=1, pause_s=70.0)])
    assert verdict is not None and verdict.place.rank == 1
    assert verdict.reason.endswith("parts done: 0")


def test_a_first_call_may_take_as_long_as_compiling_does() -> None:
    assert found([look(usual_s=None, pause_s=599.0)]) is None
    assert found([look(usual_s=None, pause_s=600.0)]) is not None


def test_a_call_may_pause_three_times_as_long_as_it_has_before() -> None:
    assert found([look(usual_s=30.0, pause_s=89.0)]) is None
    assert found([look(usual_s=30.0, pause_s=90.0)]) is not None


def test_work_without_parts_is_judged_by_heartbeats_alone() -> None:
    assert found([look(counts=False, pause_s=1000.0)]) is None
    verdict = found([look(counts=False, beat_age_s=41.0), look(rank=1, counts=False, beat_age_s=80.0)])
    assert verdict is not None and verdict.place.rank == 1 and verdict.reason.startswith("no heartbeat since ")


def test_a_stopped_process_comes_before_those_that_wait_for_it() -> None:
    """Its heartbeat says when, and a process that it has started has none."""
    verdict = found([look(parts=1), look(rank=1, parts=3, stopped=(1001,), beat_age_s=45.0)], a=1001)
    assert verdict is not None and verdict.place.rank == 1
    assert "process 1001 is stopped since " in verdict.reason and "(45 s, " in verdict.reason
    verdict = found([look(), look(rank=1, pause_s=0.0, stopped=(7, 8))], a=7, b=8)
    assert verdict is not None and "processes 7, 8 are stopped since " in verdict.reason and "(50 s, " in verdict.reason


def test_a_process_that_is_stopped_for_a_moment_is_no_cause() -> None:
    assert found([look(pause_s=1.0), look(rank=1, stopped=(1001,))]) is None


def test_a_stopped_rank_is_the_cause_also_before_it_has_begun_its_call() -> None:
    verdict = found([look(method="", stopped=(1000,), beat_age_s=45.0), look(rank=1)], a=1000)
    assert verdict is not None and (verdict.place.rank, verdict.method) == (0, "")


def test_a_stopped_rank_of_another_group_counts_only_where_nobody_makes_progress() -> None:
    """A transfer of weights has ranks of two groups."""
    engine = look("rollout", 0, method="", stopped=(77,))
    assert found([look(pause_s=1.0)], [engine], a=77) is None
    verdict = found([look()], [engine], a=77)
    assert verdict is not None and verdict.place.role == "rollout"


def test_ranks_that_wait_for_input_or_turn_are_not_to_blame() -> None:
    waiting = [look(method=""), look(rank=1, has_turn=False)]
    rollout = look("rollout", 0, method="generate")
    assert found(waiting) is None
    assert found(waiting, [replace(rollout, pause_s=1.0)]) is None
    verdict = found(waiting, [rollout])
    assert verdict is not None and (verdict.place.role, verdict.method) == ("rollout", "generate")


def test_ranks_that_are_gone_are_left_to_those_who_miss_them() -> None:
    assert found([replace(look(), is_there=False)]) is None


def test_looks_cross_hosts_as_json() -> None:
    looks = [look(stopped=(3,)), replace(look(rank=1), beat=None)]
    assert looks_from_json(looks_as_json(looks)) == looks
