"""Figures of a replay beside those of the run."""

from __future__ import annotations

import math
from typing import Any

from hybridflow.trainer.replaying.comparison import TOLERANCES, Verdict, compare_metrics, worst

EXACT = TOLERANCES["float32"]
RAN: dict[str, Any] = {
    "phase": "train",
    "step": 3,
    "train/loss": 0.5,
    "train/gradient_norm": 2.0,
    "train/entropy": "nan",
    "train/padding_share": 0.25,
    "reward/mean": 0.75,
    "rollout/staleness_mean": 1.5,
    "stream/staleness_max": 2,
    "sampling/rounds": 3,
    "train/step_time_ms": 12.0,
    "stream/engines_busy_share": 0.5,
    "rollout/throughput_tokens_per_sec": 9.0,
    "memory/actor_host_mem_mb": 400.0,
    "device/utilisation_mean": 0.5,
    "train/mfu": 0.1,
    "train/capacity_retries": 1,
    "sync/moved_bytes": 7,
}
MADE = {
    "train/loss": 0.5,
    "train/gradient_norm": 2.0,
    "train/entropy": math.nan,
    "train/padding_share": 0.25,
    "reward/mean": 0.75,
    "rollout/staleness_mean": 1.5,
    "stream/staleness_max": 2.0,
    "train/step_time_ms": 99.0,
    "train/capacity_retries": 0.0,
}


def test_what_tells_time_is_not_compared_and_what_is_not_stored_is_named() -> None:
    compared = compare_metrics(RAN, MADE, EXACT, same_layout=True)
    assert (compared.compared, compared.verdict, compared.not_made) == (7, "same", ("sampling/rounds",))
    chosen = MADE | {"sampling/rounds": 1.0}  # of the stored samples alone
    assert compare_metrics(RAN, chosen, EXACT, same_layout=True) == compared


def test_differences_are_told_by_how_far_they_are_beyond_the_tolerance() -> None:
    made = MADE | {"train/loss": 0.5 + 1e-7, "train/gradient_norm": 2.1, "reward/mean": 0.7501}
    compared = compare_metrics(RAN, made, EXACT, same_layout=True)
    assert [name for name, *_ in compared.differing] == ["train/gradient_norm", "reward/mean", "train/loss"]
    assert compared.outside == ("train/gradient_norm",) and compared.verdict == "different"
    made["train/gradient_norm"] = 2.01
    assert compare_metrics(RAN, made, EXACT, same_layout=True).verdict == "close"


def test_a_figure_of_the_update_that_is_missing_or_no_number_any_more_differs() -> None:
    without = {name: value for name, value in MADE.items() if name != "train/loss"}
    for made in (without, MADE | {"train/loss": math.nan}, MADE | {"train/entropy": 1.0}):
        assert compare_metrics(RAN, made, EXACT, same_layout=True).verdict == "different"


def test_another_layout_pads_otherwise() -> None:
    made = MADE | {"train/padding_share": 0.5}
    assert compare_metrics(RAN, made, EXACT, same_layout=False).verdict == "same"
    assert compare_metrics(RAN, made, EXACT, same_layout=True).verdict == "different"


def test_the_worst_of_several_counts() -> None:
    verdicts: list[Verdict] = ["same", "close", "same"]
    assert worst(*verdicts) == "close" and worst() == "same" and worst("different", *verdicts) == "different"
