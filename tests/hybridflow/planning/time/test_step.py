"""Seconds of a step: turns, roles side by side, and staleness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.phases import rollout_costs
from hybridflow.planning.time.step import PhaseSeconds, step_seconds
from hybridflow.planning.time.workload import drawn_lengths
from tests.hybridflow.planning.search.test_placements import WORK

SECONDS = PhaseSeconds(
    rollout=10.0, stream=7.0, scoring={"critic": 1.0, "reference": 2.0}, update={"actor": 5.0, "critic": 4.0},
    transfer=0.5, driver=0.25,
)  # fmt: skip
TOGETHER = [frozenset({"actor", "critic", "reference", "rollout"})]


def test_roles_on_the_same_devices_take_turns() -> None:
    assert step_seconds(SECONDS, TOGETHER).step == pytest.approx(10 + 3 + 9 + 0.5 + 0.25)
    apart = [frozenset({"actor", "rollout"}), frozenset({"critic"}), frozenset({"reference"})]
    seconds = step_seconds(SECONDS, apart)
    assert seconds.step == pytest.approx(10 + 2 + 5 + 0.5 + 0.25) and seconds.bottleneck == "rollout"


def test_the_longer_of_generation_and_training_bounds_a_stale_step() -> None:
    apart = [frozenset({"actor", "critic", "reference"}), frozenset({"rollout"})]
    one = step_seconds(SECONDS, apart, staleness=1)
    assert one.step == pytest.approx(9 + 3 + 0.5 + 0.25) and one.bottleneck == "training"
    slow = replace(SECONDS, rollout=20.0, stream=15.0)
    assert step_seconds(slow, apart, staleness=1).step == pytest.approx(20.5)
    assert step_seconds(slow, apart, staleness=2, stream=True).step == pytest.approx(15.5)
    assert step_seconds(slow, apart, stream=True).step == step_seconds(slow, apart).step
    assert one.hidden == pytest.approx(22.75 - one.step)


def test_a_stream_waits_for_the_longest_response_of_a_batch() -> None:
    """The batch of a step begins two updates earlier at most at staleness 1, and ends with its tail."""
    apart = [frozenset({"actor", "critic", "reference"}), frozenset({"rollout"})]
    tail = replace(SECONDS, rollout=40.0, stream=7.0)
    after = 9 + 3 + 0.25 + 0.5  # training and transfer, after the batch
    assert step_seconds(tail, apart, staleness=1, stream=True).step == pytest.approx((40.5 + after) / 2)
    assert step_seconds(tail, apart, staleness=8, stream=True).step == pytest.approx(after)


def test_a_stream_whose_weights_change_reads_the_tokens_in_flight_again() -> None:
    engines = EngineShape(requests=256)
    (cost, kept), (_, again) = (
        rollout_costs(WORK, load_profile("h200").hardware, replace(engines, recomputes=recomputes), 1e9)
        for recomputes in (False, True)
    )
    assert kept < again < kept + 1.5 * cost.prefill


def test_lengths_have_the_mean_that_was_given() -> None:
    lengths = drawn_lengths(1000.0, 100_000, 0.8)
    assert sum(lengths) / len(lengths) == pytest.approx(1000, rel=1e-3)
    for mean, longest, spread in ((512.0, 1024, 0.8), (1000.0, 1024, 0.8), (512.0, 1024, 3.0), (1024.0, 1024, 0.5)):
        cut = drawn_lengths(mean, longest, spread)
        assert sum(cut) / len(cut) == pytest.approx(mean, rel=1e-3) and max(cut) <= longest
    assert max(lengths) > 4000 and drawn_lengths(1000.0, 512, 0.0) == (512.0,)
