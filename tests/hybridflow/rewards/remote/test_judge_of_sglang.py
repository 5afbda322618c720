"""The reward `judge` asks a real SGLang server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import reward_metrics

pytestmark = [pytest.mark.processes, pytest.mark.long]

_START_S = 400


@pytest.fixture(scope="module")
def judge_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that is up."""
    directory = tmp_path_factory.mktemp("judge")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.judge_server", str(directory / "model"), str(port)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + _START_S
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()[-3000:]
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=30)


def test_verdicts_of_a_model_by_a_schema(judge_url: str) -> None:
    judge = {
        **{"url": judge_url, "model": "default", "rubric": "{{ prompt }} {{ response }}: good or bad?"},
        **{"choices": {"good": 1, "bad": 0}, "max_tokens": 64, "temperature": 1.0, "price": {"input": 1, "output": 2}},
    }
    scores = judge | {
        "choices": None, "score_range": [1, 5], "score_field": "grade", "temperature": 0.0,
        "json_schema": {"type": "object", "properties": {"grade": {"enum": [1, 2, 3, 4, 5]}}, "required": ["grade"]},
    }  # fmt: skip
    written = judge | {"pattern": "(good|bad)", "verdict_retries": 1, "max_tokens": 8}  # which this model never writes
    functions = [
        {"name": name, "path": "judge", "timeout_s": 120, "on_failure": "value", "arguments": arguments}
        for name, arguments in (("choice", judge), ("grade", scores), ("written", written))
    ]
    texts = [f"response {number}" for number in range(8)]
    with RewardFunctions(RewardConfig.model_validate({"functions": functions})) as rewards:
        result = rewards.evaluate(texts, ["question"] * 8, [""] * 8, whole=False)
        again = rewards.evaluate(texts, ["question"] * 8, [""] * 8, whole=False)
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
