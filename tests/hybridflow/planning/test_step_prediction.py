"""Predicted seconds of a step of a recipe as it is written, kept for its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.actors import load_one_recipe
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.planning.step_prediction import predicted_seconds, record_prediction
from hybridflow.planning.time.hardware import cpu_profile
from hybridflow.report.run_data import Phase, RunData, Series
from hybridflow.report.tables import prediction_table
from hybridflow.rundir.file_names import PREDICTED_SECONDS
from hybridflow.rundir.predicted_seconds import read_predicted_seconds

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
PROMPTS = Prompts([Example("a", "b")] * 2, [[1] * 8, [1] * 12])


def _devices(name: str, *overrides: str) -> tuple[object, dict[str, tuple[Device, ...]]]:
    recipe = load_one_recipe(RECIPES / f"{name}.yaml", list(overrides))
    devices = planned_devices(recipe.device_maps, recipe.placement)
    assert devices is not None
    return recipe, devices


def test_a_prediction_is_kept_for_the_report(tmp_path: Path) -> None:
    recipe, devices = _devices("ppo")
    record_prediction(recipe, devices, PROMPTS, tmp_path)  # type: ignore[arg-type]
    predicted = read_predicted_seconds(tmp_path)
    assert predicted is not None and predicted.profile == "cpu"
    phases = {"rollout", "scoring", "update", "transfer"}
    assert predicted.seconds.keys() == predicted.intervals.keys() == phases | {"step"}
    together = sum(predicted.seconds[phase] for phase in phases)
    assert together <= predicted.seconds["step"] <= 1.2 * together  # all on the same slots: turns, and the driver

    steps = np.arange(1, 4, dtype=np.float64)
    logged = {"rollout/time_ms": [1e3, 2e3, 9e3], "train/step_time_ms": [4e3, 4e3, 5e3]}
    logged["rollout/response_length_mean"] = [2.0, 2.0, 2.0]
    phase = Phase(3, {name: Series(steps, np.array(values, np.float64)) for name, values in logged.items()})
    run = RunData("run", {"train": phase}, predicted=predicted)
    table = prediction_table(run)
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows.keys() == {"rollout", "step", "tokens of a response"}  # what the run logged
    assert rows["rollout"][2] == "2" and rows["rollout"][3] == f"{predicted.seconds['rollout'] / 2 - 1:+.0%}"
    assert prediction_table(replace(run, predicted=None)) is None


def test_the_phases_are_those_of_the_recipes_layouts() -> None:
    recipe, devices = _devices("demo")
    profile = cpu_profile(2)
    demo = predicted_seconds(recipe, devices, profile, 10.0)  # type: ignore[arg-type]
    other, apart = _devices("demo", "trainer.prompts_per_step=128")
    twice = predicted_seconds(other, apart, profile, 10.0)  # type: ignore[arg-type]
    assert demo is not None and twice is not None
    assert demo.seconds["update"] <= twice.seconds["update"] and demo.seconds["step"] < twice.seconds["step"]


def test_responses_of_the_data_are_counted(tmp_path: Path) -> None:
    """Not as long as a generated response might be."""
    recipe, devices = _devices("algorithms/dpo")
    pairs = [([1] * 3, [1] * 5)] * 2
    train = GivenResponses(PROMPTS.examples, PROMPTS.tokens, responses=pairs, rewards=[(1.0, 0.0)] * 2)
    record_prediction(recipe, devices, train, tmp_path)  # type: ignore[arg-type]
    predicted = read_predicted_seconds(tmp_path)
    assert predicted is not None and predicted.response_tokens == 4


def test_a_run_that_no_model_predicts_keeps_nothing(tmp_path: Path) -> None:
    recipe, devices = _devices("stream-lease")
    record_prediction(recipe, devices, PROMPTS, tmp_path)  # type: ignore[arg-type]
    assert read_predicted_seconds(tmp_path) is None
    (tmp_path / PREDICTED_SECONDS).write_text("{}")
    with pytest.raises((UserError, OSError)):
        read_predicted_seconds(tmp_path)
