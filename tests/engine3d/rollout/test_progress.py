"""Progress that a scheduler reports to other processes, at any moment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine3d.rollout.host.progress import SchedulerReporter, SchedulerState, scheduler_state


def _scheduler(used: int, waiting: int, group: int = 0) -> Any:
    stats = SimpleNamespace(get_kv_token_stats=lambda: (used, 0.0))
    return SimpleNamespace(
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: stats),
        waiting_queue=[None] * waiting,
        ps=SimpleNamespace(attn_dp_rank=group),
    )


def test_a_scheduler_is_read_before_it_is_there_before_its_first_batch_and_after(tmp_path: Path) -> None:
    assert scheduler_state(tmp_path) == SchedulerState()
    reporter = SchedulerReporter(tmp_path, _scheduler(used=7, waiting=2))
    assert scheduler_state(tmp_path) == SchedulerState()
    for batches in (1, 2):
        reporter.batch_done()
        assert scheduler_state(tmp_path) == SchedulerState(batches, 7, 2, 0, 7 * batches)


def test_schedulers_with_requests_of_their_own_are_added_up(tmp_path: Path) -> None:
    first, second = (SchedulerReporter(tmp_path, _scheduler(5 + group, group, group)) for group in (0, 1))
    first.batch_done()
    assert scheduler_state(tmp_path) == SchedulerState(1, 5, 0, 0, 5)
    for reporter in (first, second):
        reporter.batch_done()
    assert scheduler_state(tmp_path) == SchedulerState(3, 11, 1, 0, 16)
