"""Transfers between GPUs, by every way that the benchmark measures: each is verified bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.reshard_plan import MODELS
from benchmarks.reshard_run import Case, measure
from engine3d.layout import Layout

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("layout", "tp", "ep", "engines", "ways"),
    [
        (Layout(ep=2, dp=2), 2, 2, 1, ("share",)),
        (Layout(tp=2), 1, 1, 2, ("one_sided", "engines", "collective", "baseline")),
        (Layout(pp=2), 2, 1, 1, ("one_sided", "collective")),
    ],
)
def test_every_way_between_two_gpus(
    layout: Layout, tp: int, ep: int, engines: int, ways: tuple[str, ...], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "vocab_size": 4096}))
    case = Case(
        model=tmp_path,
        train=layout,
        tp=tp,
        ep=ep,
        engines=engines,
        hosts=1,
        colocated=True,
        ways=ways,
        repeats=2,
        warm_ups=1,
        dtype="bfloat16",
        scratch=tmp_path,
        verify=True,
    )
    result = measure(case)
    for way, rates in result["ways"].items():
        assert rates["serves_what_was_sent"], way
        if way != "baseline":
            assert rates["verified"], way
            assert rates["bytes_moved"] == rates["bytes_needed"], way
            assert rates["staging_bytes"] <= 256 * 10**6, way
    if "share" in ways:
        shared = result["ways"]["share"]
        assert shared["bytes_aliased"] > 20 * shared["bytes_moved"]
