"""A stream whose trainer is much slower than its engines, and one whose engines are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.paced_loop import STEPS
from tests.integration.reference_runs import ROOT, run_module

pytestmark = [pytest.mark.processes, pytest.mark.long]

GROUPS, STALENESS = 8, 2


def _steps(directory: Path, *, pause_s: float, rollout: dict[str, Any]) -> list[dict[str, float]]:
    recipe = {
        "base": str(ROOT / "launch/recipes/stream.yaml"),
        "run_dir": str(directory),
        "warmup": None,
        "data": {"arithmetic": {"train_size": 100}},
        "rollout": {"samples_per_prompt": 4} | rollout,
        "trainer": {"steps": STEPS, "prompts_per_step": GROUPS, "max_staleness": STALENESS},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run_module("tests.integration.paced_loop", str(path), str(directory / "figures.json"), str(pause_s))
    steps: list[dict[str, float]] = json.loads((directory / "figures.json").read_text())
    assert len(steps) == STEPS
    return steps


@pytest.mark.release
def test_engines_stop_at_a_full_queue_and_wait_for_a_slow_trainer(tmp_path: Path) -> None:
    steps = _steps(tmp_path, pause_s=4.0, rollout={})
    for number, step in enumerate(steps[1:], 1):
        # The queue was full, and what the step leaves is all that the limit allows: the groups that the step before has
        # made room for have just begun. The last groups are those of the last step.
        left = min(STALENESS, STEPS - 1 - number) * GROUPS
        assert step["stream/ready_groups"] + step["stream/groups_in_flight"] == left
        assert step["stream/groups_in_flight"] <= GROUPS
        assert step["stream/staleness_max"] == min(number, STALENESS)
        assert step["stream/engines_busy_share"] < 0.5 and step["stream/trainer_wait_share"] < 0.1
    assert sum(step["stream/evicted_groups"] for step in steps) == 0


@pytest.mark.release
def test_a_trainer_waits_for_slow_engines_and_learns_from_what_is_whole(tmp_path: Path) -> None:
    slow = {"sampling": {"max_new_tokens": 48, "ignore_eos": True}, "engine": {"max_running_requests": 1}}
    steps = _steps(tmp_path, pause_s=0.0, rollout=slow)
    for step in steps[1:-1]:
        assert step["stream/ready_groups"] < GROUPS and step["stream/groups_in_flight"] > 0
        assert step["stream/engines_busy_share"] > 0.6 and step["stream/trainer_wait_share"] > 0.6
        assert 0 < step["stream/staleness_max"] <= STALENESS
        assert step["rollout/response_length_mean"] == 48
