"""Settings of training that would do nothing, or not what they say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine3d.training.config import OptimizerConfig, TrainConfig


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"decay_steps": 10}, "decay_steps=10 does nothing with schedule=constant"),
        ({"overlap_offload": True}, "overlap_offload=true does nothing with offload=false; expected offload=true"),
        ({"lr": 1e-5, "min_lr": 1e-6}, "min_lr=1e-06 does nothing with schedule=constant"),
        ({"schedule": "linear"}, "schedule=linear needs decay_steps"),
    ],
)
def test_a_schedule_is_whole_and_nothing_beside_it(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        OptimizerConfig(**settings)


def test_float32_has_no_masters_of_transformer_engine() -> None:
    """Its FusedAdam makes them and updates the parameters alone."""
    aware = OptimizerConfig(precision_aware=True)
    assert TrainConfig(dtype="bfloat16", optimizer=aware).optimizer.precision_aware
    with pytest.raises(ValidationError, match="precision_aware=true with dtype=float32"):
        TrainConfig(dtype="float32", optimizer=aware)
