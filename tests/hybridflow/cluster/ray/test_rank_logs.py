"""Logs of a node on their way to the driver's run directory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.ray import rank_logs
from hybridflow.cluster.ray.rank_logs import LogReader, NewBytes, make_directory, write
from hybridflow.rundir.status.heartbeat import Heartbeat, HeartbeatFile, read_heartbeat

BEAT = Heartbeat("actor", 1, "host-1", 77, "update", True, 1.0, 3, 2.0, None, True, 3.0)
BEHIND = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run's directory on a node."""
    (tmp_path / "run/logs").mkdir(parents=True)
    return tmp_path / "run"


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_new_bytes_are_read_once_and_files_that_are_begun_again_from_their_beginning(run: Path) -> None:
    log = run / "logs/actor-1.log"
    add(log, "of an earlier start\n")
    reader = LogReader(run, ["actor-1", "rollout-0", "sglang-0"], "host-1")
    assert reader.read(BEHIND) == []
    add(log, "one\nhal")
    add(run / "logs/sglang-0.stacks", "File ...\n")
    add(run / "logs/actor-0.log", "of no process here\n")
    new = {item.file: item.data for item in reader.read(BEHIND)}
    assert new == {"logs/actor-1.log": b"one\nhal", "logs/sglang-0.stacks": b"File ...\n"}
    add(log, "f\n")
    assert reader.read(BEHIND) == [NewBytes("logs/actor-1.log", b"f\n")]
    (run / "logs/rollout-0.log").touch()
    assert reader.read(BEHIND) == [NewBytes("logs/rollout-0.log", b"")]
    assert reader.read(BEHIND) == []
    log.unlink()
    for text in ("in its place\n", "cut\n", "begun again, and longer than it was\n"):  # as an engine does
        log.write_text(text)
        assert reader.read(BEHIND) == [NewBytes("logs/actor-1.log", text.encode())]


def test_bytes_of_a_log_that_is_written_too_fast_are_left_out(run: Path) -> None:
    log = run / "logs/actor-1.log"
    reader = LogReader(run, ["actor-1"], "host-1")
    add(log, "begins\nhalf")
    [begin] = reader.read(4000)
    lines = [f"line {number:06}" for number in range(1000)]
    add(log, "\n" + "".join(f"{line}\n" for line in lines))
    [new] = reader.read(4000)
    first, half, notice, *rest = (begin.data + new.data).decode().splitlines()
    assert (first, half) == ("begins", "half")
    assert rest == lines[-len(rest) :] and 80 <= len(rest) <= 83
    left_out = log.stat().st_size - len("begins\nhalf") - 12 * len(rest)
    assert notice == f"hybridflow: {left_out:,} bytes left out here; {log} on host-1 has them"


def test_a_busy_log_leaves_room_for_the_others(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "MOST_BYTES", 1000)
    for rank in range(3):
        add(run / f"logs/actor-{rank}.log", "")
    reader = LogReader(run, ["actor-0", "actor-1", "actor-2"], "host-1")
    for rank in range(3):
        add(run / f"logs/actor-{rank}.log", f"{rank}" * 900)
    kept = {f"logs/actor-{rank}.log": b"" for rank in range(3)}
    while new := reader.read(BEHIND):
        assert sum(len(item.data) for item in new) <= 1000
        for item in new:
            kept[item.file] += item.data
    assert kept == {f"logs/actor-{rank}.log": b"%d" % rank * 900 for rank in range(3)}


def test_the_copy_is_what_was_written(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    reader = LogReader(run, ["actor-1"], "host-1")
    (run / "flight-recorder/gloo").mkdir(parents=True)
    recorded = bytes(range(256)) * 300
    (run / "flight-recorder/gloo/actor_1").write_bytes(recorded)
    (run / "logs/actor-1.log").write_bytes(b"\xff\x00 not text\n")
    (run / "logs/nccl-timeout-actor_1").write_bytes(b"dump")
    file = HeartbeatFile(run / "logs/actor-1.heartbeat")
    file.write(BEAT)
    write(copy, reader.read(BEHIND))
    assert reader.read(BEHIND) == []
    assert (copy / "logs/actor-1.log").read_bytes() == b"\xff\x00 not text\n"
    assert (copy / "logs/nccl-timeout-actor_1").read_bytes() == b"dump"
    assert (copy / "flight-recorder/gloo/actor_1").read_bytes() == recorded
    assert read_heartbeat(copy / "logs/actor-1.heartbeat") == BEAT
    file.write(replace(BEAT, at=9.0))
    [new] = reader.read(BEHIND)
    assert json.loads(new.data)["at"] == 9.0
    write(copy, [new])
    assert read_heartbeat(copy / "logs/actor-1.heartbeat") == replace(BEAT, at=9.0)


def test_earlier_logs_of_a_node_get_another_name_and_a_node_that_cannot_write_says_so(run: Path) -> None:
    add(run / "logs/actor-1.log", "of an earlier run\n")
    make_directory(run, in_place=True)
    assert (run / "logs/actor-1.log").exists()
    make_directory(run, in_place=False)
    assert (run / "logs.1/actor-1.log").read_text() == "of an earlier run\n" and not list((run / "logs").iterdir())
    previous = os.umask(0o022)
    try:
        make_directory(run, in_place=True, private=True)
        (run / "logs/actor-1.log").touch()
    finally:
        os.umask(previous)
    assert [path.stat().st_mode & 0o777 for path in (run, run / "logs/actor-1.log")] == [0o700, 0o600]
    (run / "file").touch()
    with pytest.raises(UserError, match=r"run_dir: cannot make .*/file/run/logs: Not a directory"):
        make_directory(run / "file/run", in_place=False)
