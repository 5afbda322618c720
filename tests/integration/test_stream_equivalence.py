"""Steps from a stream with staleness 0 are those from calls of all engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.reference_runs import differences, run_module, without_digests
from tests.integration.streamed_steps import STREAMED
from tests.support.proves import proves

TRAINED = "packing recomputation optimizer_offload"
pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of each algorithm both ways, on roles that were started once."""
    output = tmp_path_factory.mktemp("streamed") / "found.json"
    run_module("tests.integration.streamed_steps", str(output))
    by_case: dict[str, dict[str, Any]] = json.loads(output.read_text())
    return by_case


@proves(
    "qwen3_moe",
    f"{TRAINED} resharding streams",
    f"{TRAINED} offload critic resharding streams",
)
@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_with_staleness_0_makes_the_steps_of_a_call(name: str, stepped: dict[str, dict[str, Any]]) -> None:
    call, stream = (_comparable(stepped[name][way]) for way in ("call", "stream"))
    lines = differences(stream, call, relative=1e-6, absolute=1e-6)
    assert not lines, "\n".join(lines[:20])


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    """Values without metrics and columns that only a stream has, and without rates, times and bits of weights.

    Responses reach a scheduler one by one from a stream, so that it computes prompts in other batches: log-probs differ
    by a rounding of float32 then, and what is computed of them by as much.
    """
    columns = [{key: column for key, column in step.items() if key not in _OF_STREAMS} for step in values["columns"]]
    metrics = [{key: value for key, value in step.items() if not _of_a_way(key)} for step in values["metrics"]]
    return without_digests(values | {"columns": columns, "metrics": metrics})


_OF_STREAMS = frozenset({"token_versions", "newest_versions"})


def _of_a_way(metric: str) -> bool:
    return metric.startswith("stream/")
