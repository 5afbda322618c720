"""The benchmark of launches: a few agents come, begin, and end of a failure, and every figure is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import _LIMIT_S, measure_agents

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("failure", ["fail", "lost"])
def test_a_few_agents(tmp_path: Path, failure: str) -> None:
    measurement = measure_agents(tmp_path / "run", 6, failure, processes=2, idle_s=1.0)
    assert measurement["processes"] == 3
    assert 0 <= measurement["seconds_until_all_are_there"] <= measurement["seconds_until_command"] < _LIMIT_S
    assert 0 < measurement["seconds_from_failure_to_exit_of_all"] < _LIMIT_S
    assert (
        0 < measurement["supervisor_cpu_s_until_command"] < measurement["supervisor_cpu_s"] < measurement["all_cpu_s"]
    )
    assert measurement["supervisor_peak_bytes"] >= measurement["supervisor_bytes_while_it_runs"] > 10 << 20
