"""Measurements of a stream of two real engines."""

from __future__ import annotations

import pytest

from benchmarks.stream_engines import BATCH, COMMON, PROMPTS, RECIPE, SAMPLES, WAYS, measured, table
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_recipe(way: str) -> None:
    recipe = load_recipe(ROOT / RECIPE, [*COMMON, *WAYS[way]])
    check_recipe(recipe)
    assert (recipe.rollout.stream is None) == way.startswith(BATCH)


def test_tokens_are_those_of_the_steps_that_are_measured() -> None:
    records = [
        {"train/step_time_ms": 500.0, "rollout/response_length_mean": 20.0},
        {"train/step_time_ms": 1500.0, "rollout/response_length_mean": 30.0},
    ]
    assert measured(records) == {"tokens_per_s": 50 * PROMPTS * SAMPLES / 2, "step_s": 1.0}
    shares = {"stream/trainer_wait_share": 0.25, "stream/engines_busy_share": 0.75}
    stats = measured([records[0] | shares])
    assert (stats["trainer_wait_share"], stats["engines_busy_share"]) == (0.25, 0.75)
    idle = {"stream/trainer_wait_share": 0.5, "stream/engines_busy_share": 0.25}
    stats = measured([records[0] | shares, records[1] | idle])  # a quarter of the time, and three quarters
    assert (stats["trainer_wait_share"], stats["engines_busy_share"]) == (0.4375, 0.375)


def test_ratios_are_to_the_batch_call_of_the_same_turn() -> None:
    by_mode = {
        BATCH: [{"tokens_per_s": 100.0, "step_s": 2.0}, {"tokens_per_s": 50.0, "step_s": 4.0}],
        "stream": [{"tokens_per_s": 150.0, "step_s": 1.5}, {"tokens_per_s": 100.0, "step_s": 2.0}],
    }
    *_, batch, stream = table(by_mode)
    assert batch == f"| {BATCH} | 75 | 3.00 | 1.00 (1.00 to 1.00) |"
    assert stream == "| stream | 125 | 1.75 | 1.75 (1.50 to 2.00) |"
