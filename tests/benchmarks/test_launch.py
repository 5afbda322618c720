"""The benchmark of launches: a few agents come, begin, and end of a failure, and every figure is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import measure_agents

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("failure", ["fail", "lost"])
def test_a_few_agents(tmp_path: Path, failure: str) -> None:
    found = measure_agents(tmp_path / "run", 6, failure, processes=2, idle_s=1.0)
    assert found["processes"] == 3 and found["pairs_tried"] == 30
    assert 0 <= found["seconds_of_doctor"] <= found["seconds_until_command"] < 60
    assert 0 < found["seconds_from_failure_to_exit_of_all"] < 60
    assert 0 < found["supervisor_cpu_s_until_command"] < found["supervisor_cpu_s"] < found["all_cpu_s"]
    assert found["supervisor_peak_bytes"] >= found["supervisor_bytes_while_it_runs"] > 10 << 20
