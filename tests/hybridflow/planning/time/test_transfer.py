"""Bytes and seconds of a transfer next to plans that were made exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.plan_truth import RESULTS
from benchmarks.reshard_plan import named_model, parse_layout, parse_rollout
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.transfer import transfer_cost

HARDWARE = replace(load_profile("h200").hardware, transfer_s=0.0, transfer_share=1.0)


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "deepseek-v3"])
def test_the_busiest_rank_has_the_bytes_of_the_exact_plan(name: str) -> None:
    spec, compared = named_model(name), 0
    for line in (RESULTS / "plans" / f"{name}.jsonl").read_text().splitlines():
        plan = json.loads(line)
        if "refused" in plan or plan["colocated"]:
            continue
        layout = parse_layout(plan["train"].replace(" ", ","))
        rollout = parse_rollout(plan["rollout"])
        engines = EngineShape(tp=rollout.tp, ep=rollout.ep, engines=rollout.engines)
        cost = transfer_cost(spec, HARDWARE, layout, engines, colocated=False)
        assert cost.network and cost.busiest == pytest.approx(plan["transfer"]["max_rank_bytes"], rel=0.35)
        assert cost.nbytes == pytest.approx(plan["transfer"]["bytes_held"], rel=0.1)
        compared += 1
    assert compared > 3


def test_a_colocated_engine_shares_experts_that_are_cut_alike() -> None:
    spec, layout = named_model("qwen3-30b-a3b"), parse_layout("ep=4,dp=4")
    alike = transfer_cost(spec, HARDWARE, layout, EngineShape(tp=4, ep=4, attention_dp=4), colocated=True)
    other = transfer_cost(spec, HARDWARE, layout, EngineShape(tp=1, engines=4), colocated=True)
    assert alike.nbytes < 0.1 * other.nbytes
    assert not alike.network and alike.seconds < other.seconds
    apart = transfer_cost(spec, HARDWARE, layout, EngineShape(tp=4, ep=4, attention_dp=4), colocated=False)
    assert apart.nbytes > alike.nbytes
