"""Predictions of measured runs do not get worse."""

from __future__ import annotations

import json

import pytest

from benchmarks import plan_layouts, plan_truth


@pytest.mark.slow
def test_errors_are_not_larger_than_those_that_are_published() -> None:
    compared = plan_truth.comparisons()
    published = json.loads((plan_truth.README.parent / "truth.json").read_text())
    summary = plan_truth.summary(compared)
    if layouts := published.pop(plan_truth.LAYOUTS, None):
        cases = plan_layouts.measured_cases()
        assert len(cases) >= layouts["cases"]
        assert plan_layouts.correlation_of(cases) >= layouts["rank_correlation"] - 0.005
    assert summary["step"]["runs"] >= published["step"]["runs"] > 12
    for name, errors in published.items():
        assert summary[name]["median"] <= errors["median"] + 0.005, name
        assert summary[name]["worst"] <= errors["worst"] + 0.01, name
    assert plan_truth.page(compared) == plan_truth.README.read_text()


@pytest.mark.slow
def test_runs_that_are_left_out_have_a_reason_in_their_recipe() -> None:
    reasons = {run.name: plan_truth.reason(run) for run in plan_truth.measured_runs() if plan_truth.reason(run)}
    assert len(reasons) <= 5 and "h200-4gpu-30b/five-steps-run" not in reasons
