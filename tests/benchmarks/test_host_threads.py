import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.beside_verl.host_threads import main, rollouts, samples

LOG = """[2026-12-01 20:53:16] Prefill batch, #new-seq: 16, #new-token: 16384
[2026-12-01 20:53:17] Decode batch, #running-req: 512, cuda graph: True, gen throughput (token/s): 512.0
[2026-12-01 20:53:19] Decode batch, #running-req: 512, cuda graph: True, gen throughput (token/s): 64000.0
[2026-12-01 20:53:40] Decode batch, #running-req: 512, cuda graph: True, gen throughput (token/s): 51200.0
"""


@pytest.fixture
def busy_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_busy_thread_is_sampled_with_its_processor(busy_process: int) -> None:
    record = next(samples(0.5))
    (thread,) = [thread for thread in record["threads"] if thread["pid"] == busy_process]
    assert thread["tid"] == busy_process
    assert thread["cpu"] > 0
    assert thread["cpu"] + thread["wait"] >= 0.05
    assert thread["processor"] in range(os.cpu_count() or 1)
    assert len(record["busy"]) == os.cpu_count()
    assert all(milliseconds > 0 for milliseconds in record["loops_ms"])


def test_rollouts_are_told_apart_by_their_pauses() -> None:
    first, second = rollouts(LOG)
    assert [milliseconds for _, milliseconds in first] == [1000.0, 8.0]
    assert [milliseconds for _, milliseconds in second] == [10.0]


def test_the_busiest_threads_of_a_rollout_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thread = {"pid": 7, "tid": 8, "process": "scheduler", "name": "scheduler", "processor": 3}
    records = [
        {
            "time": datetime(2026, 12, 1, 20, 53, second).timestamp(),
            "busy": [0.5, 1.0],
            "stolen": 0.0,
            "loops_ms": [2.0, 20.0],
            "threads": [thread | {"cpu": 0.9, "wait": 0.1, "system": 0, "voluntary": second, "involuntary": 0}],
        }
        for second in (18, 19, 30)
    ]
    (tmp_path / "threads.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "engine.log").write_text(LOG)
    main([str(tmp_path / "threads.jsonl"), "--rollouts", str(tmp_path / "engine.log")])
    assert capsys.readouterr().out.splitlines() == [
        "rollout 1:",
        "decoding step 8.0 ms, 2 s: 1.5 processors busy, 0.000 stolen, loops 2.00 and 20.00 ms",
        "  7/8 scheduler/scheduler: cpu 0.90, wait 0.100, switches/s 0 voluntary 0 involuntary, processors {3: 2}",
        "rollout 2:",
    ]
