"""Order in which engines get new weights, and the calls that the stream gets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine3d.errors import EngineError
from hybridflow.metrics.timeline import timeline
from hybridflow.roles.rollout import Pause
from hybridflow.rollout.config import RolloutRole
from hybridflow.trainer.weight_sync import WeightSync, _Transfer

_LIMIT_S = 10.0


class _Answer:
    """A call that ends when what it waits for has happened."""

    def __init__(self, log: list[str], call: str, value: Any = None, after: threading.Event | None = None) -> None:
        self._log, self._call, self._value, self._after = log, call, value, after

    def wait(self) -> None:
        assert self._after is None or self._after.wait(_LIMIT_S), f"{self._call}: never"
        if self._call not in self._log:
            self._log.append(self._call)

    def result(self) -> Any:
        self.wait()
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def abandon(self) -> None:
        """Nothing runs."""


class _Engines:
    """Calls of some engines; `drained` is when the responses of one have ended."""

    def __init__(self, log: list[str], numbers: Sequence[int], drained: threading.Event | None) -> None:
        self._log, self._numbers, self._drained = log, numbers, drained
        self.fails = False
        self.lost: dict[int, str] = {}

    def _answer(self, call: str, value: Any = None, after: threading.Event | None = None) -> _Answer:
        return _Answer(self._log, f"{call} {' '.join(map(str, self._numbers))}", value, after)

    def begin_weights(self, version: int, *, in_flight: str) -> _Answer:
        self._log.append(f"ask {' '.join(map(str, self._numbers))}")
        return self._answer("begin", [self.lost.get(number) for number in self._numbers], self._drained)

    def seal_weights(self, version: int, *, flush_cache: bool, base: Any) -> _Answer:
        return self._answer("seal", EngineError("rollout engine died") if self.fails else None)

    def commit_weights(self, version: int) -> _Answer:
        return self._answer("commit", [Pause(10.0 * number, 11.0 * number) for number in self._numbers])


class _Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def change(self, engines: Sequence[int]) -> None:
        self._log.append(f"change {' '.join(map(str, engines))}")

    def serve(self, engines: Sequence[int], version: int) -> None:
        self._log.append(f"serve {' '.join(map(str, engines))} version {version}")

    def restart_engine(self, engine: int, cause: str) -> None:
        self._log.append(f"restart {engine}: {cause}")


def _sync(
    log: list[str], policy: str, groups: Sequence[range], *, rolling: bool = True, drained: Sequence[Any] = (None,) * 9
) -> tuple[WeightSync, list[_Engines]]:
    config = RolloutRole(stream={"on_new_weights": policy}, weights={"rolling": rolling})  # type: ignore[arg-type]
    actor: Any = SimpleNamespace(send_weights=lambda version, transfer: _Answer(log, f"send {transfer}", [{}]))
    rollout: Any = SimpleNamespace(layout=SimpleNamespace(tp=1, dp=max(group[-1] for group in groups) + 1))
    sync = WeightSync(actor, rollout, None, config, Path("nowhere"))  # type: ignore[arg-type]
    engines = [_Engines(log, group, done) for group, done in zip(groups, drained, strict=False)]
    plan: Any = SimpleNamespace(bytes_aliased=0, bytes_moved=7)
    sync._transfers = tuple(
        _Transfer(number, group, calls, plan, engines_receive=False)  # type: ignore[arg-type]
        for number, (group, calls) in enumerate(zip(groups, engines, strict=True))
    )
    return sync, engines


def test_one_engine_after_another_stops_receives_and_goes_on() -> None:
    log: list[str] = []
    sync, _ = _sync(log, "recompute", [range(1), range(1, 2)])
    before = len(timeline.spans)
    values = sync.sync_weights(4, _Stream(log))
    one, other = log[: len(log) // 2], log[len(log) // 2 :]
    assert one == ["change 0", "ask 0", "begin 0", "send 0", "seal 0", "commit 0", "serve 0 version 4"]
    assert other == [line.replace("0", "1") for line in one]
    assert (values["sync/pause_sum_ms"], values["sync/pause_max_ms"]) == (1000.0, 1000.0)
    assert values["sync/moved_bytes"] == 14
    spans = [span for span in timeline.spans if span.method == "paused"]
    assert len(timeline.spans) == before + 2 and (1, 10.0, 11.0) in [(s.rank, s.begin, s.end) for s in spans]


def test_all_responses_are_waited_for_at_the_same_time_and_who_comes_first_is_first() -> None:
    log: list[str] = []
    second = threading.Event()
    sync, engines = _sync(log, "wait", [range(2), range(2, 4)], drained=(second, None))
    second_commits = engines[1].commit_weights

    def commit_weights(version: int) -> Any:
        second.set()
        return second_commits(version)

    engines[1].commit_weights = commit_weights  # type: ignore[method-assign]
    sync.sync_weights(2, _Stream(log))
    assert log[:3] == ["change 0 1 2 3", "ask 0 1", "ask 2 3"]
    order = [line for line in log if line.startswith(("send", "commit", "serve"))]
    assert order == [
        "send 1",
        "commit 2 3",
        "serve 2 3 version 2",
        "send 0",
        "commit 0 1",
        "serve 0 1 version 2",
    ]


def test_all_at_once_tells_a_stream_nothing() -> None:
    log: list[str] = []
    sync, _ = _sync(log, "wait", [range(3)], rolling=False)
    values = sync.sync_weights(2, _Stream(log))
    assert log == ["ask 0 1 2", "begin 0 1 2", "send 0", "seal 0 1 2", "commit 0 1 2"]
    assert (values["sync/pause_sum_ms"], values["sync/pause_max_ms"]) == (3000.0, 2000.0)


@pytest.mark.parametrize("policy", ["wait", "resend"])
def test_an_engine_that_dies_in_its_transfer_ends_it(policy: str) -> None:
    log: list[str] = []
    sync, engines = _sync(log, policy, [range(1), range(1, 2)])
    engines[0].fails = engines[1].fails = True
    with pytest.raises(EngineError, match="rollout engine died"):
        sync.sync_weights(2, _Stream(log))
    assert not any(line.startswith(("commit", "serve")) for line in log)


@pytest.mark.parametrize("policy", ["wait", "resend"])
@pytest.mark.parametrize("rolling", [False, True])
def test_an_engine_that_is_lost_before_its_transfer_is_left_out_and_the_others_get_theirs(
    policy: str, rolling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    sync, engines = _sync(log, policy, [range(2), range(2, 4)], rolling=rolling)
    engines[0].lost[1] = "rollout engine died"

    def connect(sync: WeightSync) -> tuple[_Transfer, ...]:
        assert sync._together == [[0, 2, 3]] and not sync._transfers
        log.append("connect")
        groups, plan = [[0], [2, 3]], SimpleNamespace(bytes_aliased=0, bytes_moved=7)
        made: list[Any] = [
            _Transfer(number, group, _Engines(log, group, None), plan, engines_receive=False)  # type: ignore[arg-type]
            for number, group in enumerate(groups)
        ]
        return tuple(made)

    monkeypatch.setattr(WeightSync, "_connect", connect)
    values = sync.sync_weights(2, _Stream(log))
    assert [line for line in log if line.startswith("restart")] == ["restart 1: rollout engine died"]
    commits = [line for line in log if line.startswith(("commit", "connect"))]
    assert commits == ["commit 2 3", "connect", "commit 0"]
    assert values["sync/pause_max_ms"] == 3000.0


def test_an_engine_that_is_lost_outside_a_stream_ends_the_transfer() -> None:
    log: list[str] = []
    sync, engines = _sync(log, "wait", [range(2)])
    engines[0].lost[1] = "rollout engine died"
    with pytest.raises(EngineError, match="rollout engine 1: rollout engine died"):
        sync.sync_weights(2)
