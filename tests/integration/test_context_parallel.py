"""Runs whose models have context-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.metrics.expert_loads import read_expert_loads
from tests.integration.algorithm_steps import SPLIT_CASES, recorded_as, run_cases_apart
from tests.integration.reference_runs import ABSOLUTE, RELATIVE, differences, run_case, stored, without_digests
from tests.integration.replayed_steps import expect_replayed
from tests.support.proves import proves

pytestmark = pytest.mark.processes


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    """The values but for shares of padding and of what is split, which depend on the layout, and digests of bits."""
    layout = ("padding_share", "split_share")
    metrics = [{name: value for name, value in step.items() if not name.endswith(layout)} for step in values["metrics"]]
    return without_digests(values) | {"metrics": metrics}


@proves("qwen3_moe", "cp ep packing resharding")
@pytest.mark.long
def test_its_steps_are_those_recorded_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Warm-up, rollouts, log-probs of actor and reference, updates, weights for the engines, evaluation, export."""
    values = run_case("grpo-colocate", tmp_path, base="context-parallel", train={"layout": {"cp": 2, "ep": 2}})
    recorded = stored("grpo-colocate")["values"]
    lines = differences(_comparable(values), _comparable(recorded), relative=RELATIVE, absolute=ABSOLUTE)
    assert not lines, "\n".join(lines[:20])
    steps = [step for step in values["metrics"] if step["phase"] == "train"]
    loads = read_expert_loads(tmp_path / "grpo-colocate/expert_loads.jsonl")
    assert [record.step for record in loads] == [step["step"] for step in steps]
    for step, record in zip(steps, loads, strict=True):
        assert 0 <= step["train/split_share"] < 1
        assert record.models["actor"].entropies.mean() == pytest.approx(step["train/expert_load_entropy"], rel=1e-3)


@pytest.mark.long
def test_steps_of_distillation_and_preferences_are_those_recorded_of_one_rank(tmp_path: Path) -> None:
    """Teacher, reference and actor split longer sequences. The steps are made again from their samples."""
    stepped = run_cases_apart(tmp_path, *SPLIT_CASES)
    for name in SPLIT_CASES:
        values, recorded = stepped.values[name], stored(recorded_as(name))["values"]
        lines = differences(_comparable(values), _comparable(recorded), relative=RELATIVE, absolute=ABSOLUTE)
        assert not lines, "\n".join([name, *lines[:20]])
        assert all(step["train/split_share"] > 0 for step in values["metrics"] if step["phase"] == "train")
        expect_replayed(tmp_path / name)
