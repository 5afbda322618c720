"""Steps from a stream with staleness 0 are those from calls of all engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.reference_runs import differences, run_module
from tests.integration.streamed_steps import STREAMED

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of each algorithm both ways, on roles that were started once."""
    output = tmp_path_factory.mktemp("streamed") / "found.json"
    run_module("tests.integration.streamed_steps", str(output))
    found: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_with_staleness_0_makes_the_steps_of_a_call(name: str, stepped: dict[str, dict[str, Any]]) -> None:
    call, stream = stepped[name]["call"], stepped[name]["stream"]
    lines = differences(stream, call)
    assert not lines, "\n".join(lines[:20])
