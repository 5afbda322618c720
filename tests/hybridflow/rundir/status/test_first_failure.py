"""The card of a failure, from what ranks have said of themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rundir.status.first_failure import (
    describe,
    forget_failures,
    keep_earlier,
    read_earlier,
    read_failure,
    write_failure,
)
from hybridflow.rundir.status.heartbeat import (
    Heartbeat,
    HeartbeatFile,
    forget_heartbeats,
    read_heartbeat,
    read_heartbeats,
)

SINCE = time.mktime((2026, 11, 24, 12, 4, 31, 0, 0, -1))


def say(run: Path, role: str, rank: int, host: str, method: str, *, completed: int = 0, has_turn: bool = True) -> None:
    beat = Heartbeat(role, rank, host, 40 + rank, method, has_turn, SINCE + rank, completed, SINCE, 1.0, True, SINCE)
    (run / "logs").mkdir(exist_ok=True)
    HeartbeatFile(run / "logs" / f"{role}-{rank}.heartbeat").write(beat)


def test_a_card_says_where_and_what_all_others_were_at(tmp_path: Path) -> None:
    for rank, completed in enumerate((5, 3, 5, 4)):
        say(tmp_path, "actor", rank, f"host-{rank // 2}", "update", completed=completed)
    for rank in range(3):
        say(tmp_path, "rollout", rank, "host-2", "")
    say(tmp_path, "critic", 0, "host-0", "values", has_turn=False)
    (tmp_path / "logs" / "actor-1.stacks").write_text("Thread 1\n")
    card = describe(tmp_path, "actor rank 1, update: no progress", "step 3, update", role="actor", rank=1, since=SINCE)
    assert card.lines() == [
        "  cause      actor rank 1, update: no progress",
        "  where      host-0, actor rank 1, process 41",
        "  phase      step 3, update; since 12:04:31",
        "  others     actor 0, 2-3 on 2 hosts: update since 12:04:31, parts done: 4-5",
        "             critic 0 on host-0: waiting for its turn in values since 12:04:31",
        "             rollout 0-2 on host-2: idle since 12:04:31",
        f"  stacks     {tmp_path}/logs/*.stacks",
    ]
    write_failure(tmp_path, card)
    assert read_failure(tmp_path) == card


def test_of_a_rank_that_died_the_last_line_of_its_log_is_told(tmp_path: Path) -> None:
    say(tmp_path, "actor", 0, "host-0", "update")
    (tmp_path / "logs" / "actor-0.log").write_text("CUDA error: an illegal memory access\n\n")
    given: dict[str, Any] = {"role": "actor", "rank": 0, "since": SINCE}
    assert (
        "  last line  CUDA error: an illegal memory access" in describe(tmp_path, "x", "y", died=True, **given).lines()
    )
    assert describe(tmp_path, "x", "y", **given).last_line is None


def test_of_what_is_no_ranks_the_host_is_told(tmp_path: Path) -> None:
    card = describe(tmp_path, "host-2: no sign of life", "step 1, rollout", host="host-2 (10.0.0.12)")
    assert card.lines()[1] == "  where      host-2 (10.0.0.12)"
    assert (card.stacks, card.flight_recorder) == (None, None)


def test_the_cards_of_earlier_starts_are_kept_until_they_are_forgotten(tmp_path: Path) -> None:
    cards = [describe(tmp_path, cause, "step 1, rollout") for cause in ("one", "two")]
    keep_earlier(tmp_path, cards)
    write_failure(tmp_path, cards[1])
    assert read_earlier(tmp_path) == cards
    forget_failures(tmp_path)
    assert read_earlier(tmp_path) == [] and read_failure(tmp_path) is None


def test_a_run_that_has_not_failed_and_a_damaged_card(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    for text, reason in (
        ("{", "not valid JSON: no name in double quotes at column 2"),
        ("[]", "damaged: expected an object, found a list"),
        (json.dumps({"cause": "x"}), "damaged: it has no phase"),
    ):
        (tmp_path / "failure.json").write_text(text)
        with pytest.raises(UserError, match=f"^{tmp_path}/failure.json: {reason}$"):
            read_failure(tmp_path)


def test_heartbeats_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    say(tmp_path, "actor", 10, "host-0", "update")
    say(tmp_path, "actor", 2, "host-0", "update")
    (tmp_path / "logs" / "actor-3.heartbeat").write_text('{"role": "actor"}')
    (tmp_path / "logs" / "actor-4.heartbeat").write_bytes(b"\0" * 100)
    assert read_heartbeat(tmp_path / "none.heartbeat") is None
    assert [beat.rank for beat in read_heartbeats(tmp_path / "logs")] == [2, 10]
    forget_heartbeats(tmp_path / "logs")
    assert read_heartbeats(tmp_path / "logs") == []
