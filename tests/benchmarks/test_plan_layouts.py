"""Layouts of the demo: each is a recipe that can run, and measured ones are ranked as the model ranks them."""

from __future__ import annotations

import pytest

from benchmarks.plan_layouts import CASES, MeasuredCase, rank_correlation
from hybridflow.planning.time.hardware import load_profile


@pytest.mark.slow
def test_every_case_has_a_prediction_of_its_own() -> None:
    cases = [MeasuredCase(name, settings, [], [], [], {}) for name, settings in CASES.items()]
    assert len(cases) == 30 and len({case.settings for case in cases}) == 30
    steps = {case.name: case.predicted["step"] for case in cases}
    assert steps["dp1-256"] > steps["dp1-512"] > steps["dp1"] > steps["dp1-one-update"]
    assert steps["pp2-ep2-512"] > steps["ep2-512"] and steps["ep4"] > steps["ep2"]


def test_ranks_are_compared_whatever_the_seconds() -> None:
    assert rank_correlation([1.0, 2.0, 9.0], [3.0, 30.0, 40.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 9.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)


def test_ranks_of_a_cpu_take_turns_on_its_cores() -> None:
    cpu = load_profile("cpu").with_cluster(4).hardware
    assert cpu.for_ranks(2) is cpu
    four = cpu.for_ranks(4)
    assert cpu.for_ranks(8) == four  # of two hosts
    assert (four.flops, four.sparse_layer_s) == (cpu.flops / 2, cpu.sparse_layer_s * 2)
    gpu = load_profile("h200").hardware
    assert gpu.for_ranks(64) is gpu
