"""Logs on their way from a host to the first one: what is sent, what is kept, and what is not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.logs import log_keeper
from hybridflow.cluster.hosts.logs.log_files import MOST_BYTES, NewOutput, Piece
from hybridflow.cluster.hosts.logs.log_keeper import GatheredLogs, LogKeeper
from hybridflow.cluster.hosts.logs.log_stream import LogStream
from hybridflow.rundir.heartbeat import Heartbeat, HeartbeatFile, read_heartbeat

HERE, THERE = Host(0, "host-0", "10.0.0.10"), Host(1, "host-1", "10.0.0.11")
BEAT = Heartbeat("actor", 1, "host-1", 77, "update", True, 1.0, 3, 2.0, None, True, 3.0)
BEHIND = 1 << 20


def run_directory(path: Path) -> Path:
    (path / "logs").mkdir(parents=True)
    return path


def texts(pieces: Sequence[Piece]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for piece in pieces:
        found[piece.name] = found.get(piece.name, b"") + piece.data
    return found


def add(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_what_is_added_is_new_and_what_was_there_before_is_not(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    log = run / "logs/actor-1.log"
    add(log, "of an earlier start\n")
    output = NewOutput(run, ["actor-1", "rollout-0", "sglang-0"], "host-1")
    output.skip_present()
    assert output.read(MOST_BYTES, BEHIND) == []
    add(log, "one\nhal")
    add(run / "logs/sglang-0.stacks", "File ...\n")
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"one\nhal", "sglang-0.stacks": b"File ...\n"}
    add(log, "f\n")
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"f\n"}
    (run / "logs/rollout-0.log").touch()
    assert output.read(MOST_BYTES, BEHIND) == [Piece("logs", "rollout-0.log", b"")]
    assert output.read(MOST_BYTES, BEHIND) == []
    log.unlink()
    add(log, "in its place\n")
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"in its place\n"}
    log.write_bytes(b"cut\n")
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"cut\n"}
    log.write_bytes(b"begun anew, and longer than it was\n")  # as an engine does
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"begun anew, and longer than it was\n"}
    add(log, "more\n")
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"more\n"}


def test_a_heartbeat_is_sent_when_it_has_changed(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    output = NewOutput(run, ["actor-1"], "host-1")
    file = HeartbeatFile(run / "logs/actor-1.heartbeat")
    file.write(BEAT)
    [piece] = output.read(MOST_BYTES, BEHIND)
    assert piece.is_whole and json.loads(piece.data) == asdict(BEAT)
    assert output.read(MOST_BYTES, BEHIND) == []
    file.write(replace(BEAT, at=4.0))
    [piece] = output.read(MOST_BYTES, BEHIND)
    assert json.loads(piece.data)["at"] == 4.0


def test_nothing_but_files_of_these_processes_is_sent_and_no_link_is_followed(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    logs = run / "logs"
    for name in ("actor-2.log", "actor-1.txt", "actor-1.log.1", ".actor-1.log", "token", "driver.stacks", "-1.log"):
        add(logs / name, "not for host 0")
    (logs / "actor-1.log").symlink_to(secret)
    os.mkfifo(logs / "actor-1.stacks")
    (run / "flight-recorder").symlink_to(tmp_path)
    (tmp_path / "nccl").mkdir()
    add(tmp_path / "nccl/actor_1", "not for host 0")
    output = NewOutput(run, ["actor-1"], "host-1")
    assert output.read(MOST_BYTES, BEHIND) == []
    logs.rename(tmp_path / "elsewhere")
    logs.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/actor-1.log").unlink()
    add(tmp_path / "elsewhere/actor-1.log", "not for host 0")
    assert output.read(MOST_BYTES, BEHIND) == []
    logs.unlink()
    (tmp_path / "elsewhere").rename(logs)
    assert texts(output.read(MOST_BYTES, BEHIND)) == {"actor-1.log": b"not for host 0"}


def test_pieces_are_bounded_and_each_log_has_its_turn(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    whole = {f"actor-{rank}.log": (b"%d" % rank) * 200_000 for rank in range(3)}
    for name, text in whole.items():
        add(run / "logs" / name, text)
    processes = ["actor-0", "actor-1", "actor-2"]
    in_turn = NewOutput(run, processes, "host-1")
    assert {piece.name for _ in range(3) for piece in in_turn.read(10_000, BEHIND) if piece.data} == set(whole)
    output = NewOutput(run, processes, "host-1")
    got = dict.fromkeys(whole, b"")
    rounds = 0
    while pieces := output.read(100_000, BEHIND):
        assert sum(len(piece.data) for piece in pieces) <= 100_000
        for piece in pieces:
            got[piece.name] += piece.data
        rounds += 1
        assert rounds > 1 or len(texts(pieces)) == 3
    assert got == whole
    assert rounds == 6


def test_of_a_log_that_is_written_faster_than_it_is_sent_some_is_left_out_and_a_line_says_so(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    log = run / "logs/actor-1.log"
    output = NewOutput(run, ["actor-1"], "host-1")
    add(log, "begins\nhalf")
    kept = texts(output.read(MOST_BYTES, 4000))["actor-1.log"]
    lines = [f"line {number:06}" for number in range(1000)]
    add(log, "\n" + "".join(f"{line}\n" for line in lines))
    kept += texts(output.read(MOST_BYTES, 4000))["actor-1.log"]
    begin, half, notice, *rest = kept.decode().splitlines()
    assert (begin, half) == ("begins", "half")
    assert rest == lines[-len(rest) :] and 80 <= len(rest) <= 83
    left_out = log.stat().st_size - len("begins\nhalf") - 12 * len(rest)
    assert notice == f"hybridflow: {left_out:,} bytes left out here; {log} on host-1 has them"
    assert output.read(MOST_BYTES, 4000) == []


def test_what_is_kept_is_what_was_sent(tmp_path: Path) -> None:
    here, there = run_directory(tmp_path / "here"), run_directory(tmp_path / "there")
    (there / "flight-recorder/gloo").mkdir(parents=True)
    recorded = bytes(range(256)) * 300
    (there / "flight-recorder/gloo/actor_1").write_bytes(recorded)
    add(there / "logs/actor-1.log", b"\xff\x00 not text\n")
    add(there / "logs/nccl-timeout-actor_1", b"dump")
    HeartbeatFile(there / "logs/actor-1.heartbeat").write(BEAT)
    output, keeper = NewOutput(there, ["actor-1"], "host-1"), LogKeeper(here, {1: ["actor-1"]})
    while pieces := output.read(MOST_BYTES, BEHIND):
        keeper.keep(THERE, json.loads(json.dumps([piece.as_json() for piece in pieces])))
    assert (here / "logs/actor-1.log").read_bytes() == b"\xff\x00 not text\n"
    assert (here / "logs/nccl-timeout-actor_1").read_bytes() == b"dump"
    assert (here / "flight-recorder/gloo/actor_1").read_bytes() == recorded
    assert read_heartbeat(here / "logs/actor-1.heartbeat") == BEAT
    keeper.keep(
        THERE, [Piece("logs", "actor-1.heartbeat", json.dumps(asdict(replace(BEAT, at=9.0))).encode()).as_json()]
    )
    assert read_heartbeat(here / "logs/actor-1.heartbeat") == replace(BEAT, at=9.0)


@pytest.mark.parametrize(
    "piece",
    [
        {"directory": "logs", "name": "actor-0.log", "data": "eA=="},  # host 0's own
        {"directory": "logs", "name": "actor-2.log", "data": "eA=="},  # of no rank there
        {"directory": "logs", "name": "../metrics.jsonl", "data": "eA=="},
        {"directory": "logs", "name": "x/../actor-1.log", "data": "eA=="},
        {"directory": "logs", "name": "/etc/actor-1.log", "data": "eA=="},
        {"directory": "logs", "name": "actor-1.log\n", "data": "eA=="},
        {"directory": "logs", "name": "actor-1.py", "data": "eA=="},
        {"directory": "..", "name": "actor-1.log", "data": "eA=="},
        {"directory": "gloo", "name": "../actor_1", "data": "eA=="},
        {"directory": "logs", "name": "actor-1.log", "data": "no base64"},
        {"directory": "logs", "name": "actor-1.heartbeat", "data": "eA=="},
        {"directory": "logs", "name": "actor-1.heartbeat", "data": "e30="},
        *(
            Piece("logs", "actor-1.heartbeat", json.dumps(asdict(BEAT) | wrong).encode()).as_json()
            for wrong in (
                {"at": "now"},
                {"since": 1e300},
                {"at": -1},
                {"parts": None},
                {"host": "\x1b[2J"},
                {"pid": 0.5},
            )
        ),
        {"name": "actor-1.log"},
        "actor-1.log",
        None,
    ],
)
def test_a_host_writes_nothing_but_the_logs_of_its_ranks(
    piece: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "run")
    (run / "logs/actor-0.log").write_text("host 0\n")
    (run / "metrics.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    keeper = LogKeeper(run, {1: ["actor-1"]})
    for _ in range(2):
        keeper.keep(THERE, [piece])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size} == before
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridflow: logs of host-1 (10.0.0.11): ") and line.endswith("; left out")


def test_another_ranks_heartbeat_is_refused(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    text = json.dumps(asdict(replace(BEAT, rank=0))).encode()
    LogKeeper(run, {1: ["actor-1"]}).keep(THERE, [Piece("logs", "actor-1.heartbeat", text).as_json()])
    assert not list((run / "logs").iterdir())


def test_no_link_is_written_through_and_no_file_grows_without_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "run")
    other = tmp_path / "other"
    other.write_text("other\n")
    (run / "logs/actor-1.log").symlink_to(other)
    keeper = LogKeeper(run, {1: ["actor-1", "actor-2"]}, most_of_a_file=10)
    keeper.keep(THERE, [Piece("logs", "actor-1.log", b"x").as_json()])
    assert other.read_text() == "other\n"
    for _ in range(5):
        keeper.keep(THERE, [Piece("logs", "actor-2.log", b"1234").as_json()])
    assert (run / "logs/actor-2.log").read_text() == "12341234"
    assert "actor-2.log has 10 bytes here; the rest of it stays there; left out" in capsys.readouterr().err


class Linked:
    """A host's agent and host 0, with a queue each way in place of a connection."""

    def __init__(self, host: Host) -> None:
        self.host, self.gone, self.channel = host, asyncio.Event(), SimpleNamespace(send=self._to_agent)
        self.logs: GatheredLogs | None = None
        self.stream = LogStream(self._to_host_0)
        self.waiting = self.most_waiting = 0

    def _to_host_0(self, kind: str, **fields: Any) -> None:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        assert self.logs is not None and kind == "logs"
        self.logs.receive(self, json.loads(json.dumps({"kind": kind, **fields})))  # type: ignore[arg-type]

    def _to_agent(self, kind: str, **fields: Any) -> None:
        self.waiting -= 1
        assert kind == "logs_kept"
        self.stream.kept(fields["number"])

    async def ask(self, kind: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self.stream.actions[kind](**fields), limit_s) or {}
        except Exception as error:
            raise EngineError(f"{self.host}: {error}") from None


def linked() -> tuple[Linked, GatheredLogs]:
    """Host 1, and the logs of a run on it and on host 0, which do not share its directory."""
    member = Linked(THERE)
    member.logs = GatheredLogs([Linked(HERE), member], [1])  # type: ignore[list-item]
    return member, member.logs


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of runs: a path that is another one on host 1, as `there` and `here` stand for."""
    monkeypatch.setattr(log_keeper, "RATE", 1 << 40)
    run_directory(tmp_path / "here")
    return tmp_path


def test_logs_are_streamed_while_they_are_written_and_what_is_left_comes_at_the_end(both: Path) -> None:
    """Host 0's keeper is given another path than the agent, which in a run have the same one on two disks."""

    async def scenario() -> None:
        member, logs = linked()
        there = run_directory(both / "there")
        add(there / "logs/actor-1.log", "of an earlier run\n")
        question = {"kind": "keep_logs", "path": str(there), "in_place": False, "processes": {"1": ["actor-1"]}}
        assert await logs.answer(dict(question)) == [{}]
        assert logs._keeper is not None
        logs._keeper.run = both / "here"
        assert (there / "logs.1/actor-1.log").read_text() == "of an earlier run\n"
        add(there / "logs/actor-1.log", "first\n")
        kept = both / "here/logs/actor-1.log"
        for _ in range(200):
            if kept.exists() and kept.read_text():
                break
            await asyncio.sleep(0.05)
        assert kept.read_text() == "first\n"
        add(there / "logs/actor-1.log", "x" * (3 * MOST_BYTES))
        await logs.finish()
        assert kept.read_text() == "first\n" + "x" * (3 * MOST_BYTES)
        assert member.most_waiting == 1
        add(there / "logs/actor-1.log", "too late\n")
        await asyncio.sleep(1.5)
        assert "too late" not in kept.read_text()
        await member.stream.close()

    asyncio.run(scenario())


def test_a_host_that_cannot_write_there_says_so(both: Path) -> None:
    async def scenario() -> None:
        _, logs = linked()
        (both / "file").touch()
        path = str(both / "file/run")
        question = {"kind": "keep_logs", "path": path, "in_place": False, "processes": {"1": ["actor-1"]}}
        [answer] = await logs.answer(question)
        assert answer["error"] == f"host-1 (10.0.0.11): run_dir: cannot make {path}/logs: Not a directory"
        await logs.finish()

    asyncio.run(scenario())


def test_a_host_that_is_gone_is_not_asked(both: Path) -> None:
    async def scenario() -> None:
        member, logs = linked()
        question = {"kind": "keep_logs", "path": str(both / "there"), "in_place": True, "processes": {"1": []}}
        await logs.answer(question)
        member.gone.set()
        assert await logs.answer({"kind": "send_logs"}) == []
        await logs.finish()
        await member.stream.close()

    asyncio.run(scenario())
