"""Progress of a call that takes long, from what is seen of its ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.cluster.processes.rank_look import RankLook, looks_as_json, looks_from_json
from hybridflow.workers.call_progress import Usage, amount_done, is_first_part, moving, starting_stage
from tests.hybridflow.workers.test_standstill import look


def counted(found: RankLook, done: int, total: int, unit: str = "responses") -> RankLook:
    assert found.beat is not None
    return replace(found, beat=replace(found.beat, done=done, total=total, unit=unit))


def test_ranks_move_while_each_at_work_does_parts() -> None:
    recent, still = look(parts=3, pause_s=5.0), look(rank=1, parts=3, pause_s=40.0)
    assert moving([recent], [], 30.0) == [recent]
    assert moving([recent, still], [], 30.0) == []  # one that hangs is not hidden by another that moves
    assert moving([look(parts=3, pause_s=5.0, beat_age_s=31.0)], [], 30.0) == []  # no heartbeat
    assert moving([look(parts=0, pause_s=5.0)], [], 30.0) == []  # has only begun
    assert moving([look(parts=3, pause_s=5.0, counts=False)], [], 30.0) == []
    assert moving([look(parts=3, pause_s=40.0, usual_s=25.0)], [], 30.0) != []  # has paused as long before


def test_a_stopped_process_anywhere_is_no_progress() -> None:
    assert moving([look(parts=3, pause_s=5.0, stopped=(4711,))], [], 30.0) == []
    assert moving([look(parts=3, pause_s=5.0)], [look("rollout", stopped=(4711,))], 30.0) == []


def test_where_no_awaited_rank_has_its_turn_others_count() -> None:
    waiting, other = look(has_turn=False), look("critic", parts=2, pause_s=1.0)
    assert moving([waiting], [other], 30.0) == [other]
    assert moving([waiting], [look("critic", parts=2, pause_s=50.0)], 30.0) == []
    assert moving([waiting], [], 30.0) == []


def test_only_the_first_call_without_a_part_may_compile() -> None:
    assert is_first_part([look(usual_s=None), look(rank=1, usual_s=None)])
    assert not is_first_part([look(usual_s=None, parts=1)])
    assert not is_first_part([look(usual_s=2.0)])
    assert not is_first_part([look(usual_s=None, has_turn=False)])


def test_responses_are_summed_over_engines_with_those_that_have_answered() -> None:
    busy = counted(look("rollout", method="generate"), 112, 512)
    answered = counted(look("rollout", rank=1, method=""), 512, 512)
    assert amount_done([busy, answered], "generate", since=0.0) == "624 of 1,024 responses"
    assert amount_done([busy, answered], "generate", since=1.0) == "112 of 512 responses"  # idle since before the call


def test_micro_batches_are_those_of_the_rank_that_is_ahead() -> None:
    ranks = [counted(look(parts=7), 0, 0, "micro-batches"), counted(look(rank=1, parts=8), 0, 0, "micro-batches")]
    assert amount_done(ranks, "update", since=0.0) == "8 micro-batches done"
    assert amount_done([counted(look(parts=1), 0, 0, "micro-batches")], "update", since=0.0) == "1 micro-batch done"
    assert amount_done([look(parts=1)], "update", since=0.0) == "1 part done"


def test_busy_processes_compute_or_read() -> None:
    before = Usage.of([replace(look(), cpu_s=3.0, read_bytes=10**9)], 100.0)
    assert Usage(110.0, 3.5, 10**9, 1).is_busy_since(before)  # a twentieth of a core, which others share
    assert not Usage(110.0, 3.5, 10**9, 2).is_busy_since(before)
    assert Usage(110.0, 3.1, 2 * 10**9, 1).is_busy_since(before)
    assert not Usage(110.0, 3.1, 10**9 + 1000, 1).is_busy_since(before)
    sent = looks_from_json(looks_as_json([replace(look(), cpu_s=3.0, read_bytes=7)]))
    assert (sent[0].cpu_s, sent[0].read_bytes) == (3.0, 7)


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
