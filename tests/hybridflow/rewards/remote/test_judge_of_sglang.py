"""The reward `judge` asks a real SGLang server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine3d.errors import EngineError
from engine3d.serving import CompletionServer
from engine3d.serving.server import _reserve_port
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import reward_metrics
from tests.support.judge_model import KEY, judge_server

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompletionServer]:
    with judge_server(tmp_path_factory.mktemp("judge")) as started:
        yield started


def test_verdicts_of_a_model_by_a_schema(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = {
        **{
            "url": server.url,
            "model": "default",
            "api_key_variable": "JUDGE_KEY",
            "rubric": "{{ prompt }} {{ response }}: good or bad?",
        },
        **{"choices": {"good": 1, "bad": 0}, "max_tokens": 64, "temperature": 1.0, "price": {"input": 1, "output": 2}},
    }
    scores = judge | {
        "choices": None, "score_range": [1, 5], "score_field": "grade", "temperature": 0.0,
        "json_schema": {"type": "object", "properties": {"grade": {"enum": [1, 2, 3, 4, 5]}}, "required": ["grade"]},
    }  # fmt: skip
    written = judge | {"pattern": "(good|bad)", "verdict_retries": 1, "max_tokens": 8}  # which this model never writes
    functions = [
        {
            **{"name": name, "path": "judge", "timeout_s": 120, "on_failure": "value"},
            **{"environment": ["JUDGE_KEY"], "arguments": arguments},
        }
        for name, arguments in (("choice", judge), ("grade", scores), ("written", written))
    ]
    texts = [f"response {number}" for number in range(8)]
    with RewardFunctions(RewardConfig.model_validate({"functions": functions})) as rewards:
        result = rewards.evaluate(texts, ["question"] * 8, [""] * 8, complete=False)
        again = rewards.evaluate(texts, ["question"] * 8, [""] * 8, complete=False)
    values = reward_metrics(result)
    assert values["reward/choice/failed"] == values["reward/grade/failed"] == 0, result.failures
    assert set(result.by_name["choice"].tolist()) <= {0.0, 1.0}
    assert set(result.by_name["grade"].tolist()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert values["reward/choice/requests"] == values["reward/grade/requests"] == 8
    assert values["reward/choice/input_tokens"] == 8 * len("question response 0: good or bad?\n")
    cost = values["reward/choice/input_tokens"] + 2 * values["reward/choice/output_tokens"]
    assert values["reward/choice/cost"] == pytest.approx(cost / 1e6)
    assert 0 < values["reward/choice/latency_s"] <= values["reward/choice/latency_s_p95"]
    assert result.failed["written"].all() and values["reward/written/malformed"] == 16
    assert reward_metrics(again)["reward/choice/cache_hits"] == 8
    assert again.by_name["choice"].tolist() == result.by_name["choice"].tolist()


def test_a_server_asks_for_its_key_and_says_what_it_died_of(server: CompletionServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{server.url}/models", timeout=30)
    log = server.log_path
    assert log is not None and KEY not in log.read_text() and "<key>" in log.read_text()
    assert server._process is not None
    group = [psutil.Process(server._process.pid), *psutil.Process(server._process.pid).children(recursive=True)]
    mappings = []
    for process in group:
        with contextlib.suppress(OSError):  # some end soon
            mappings += Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    assert mappings and not [line for line in mappings if "/dev/shm/sem." in line]  # which a kill would leave
    os.kill(server._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineError, match=f"SGLang server died: its process was killed by SIGKILL; log: {log}"):
        server.check()


def test_a_port_that_another_has_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr("engine3d.serving.server._reserve_port", lambda address: taken)
    with pytest.raises(EngineError, match=r"SGLang server died during start: .*address already in use"):
        judge_server(tmp_path).start()


def test_no_other_gets_the_port_of_a_server_that_starts() -> None:
    with _reserve_port("127.0.0.1") as reserved, socket.socket() as other:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address) as server:  # as SGLang does
            assert server.getsockname() == address
