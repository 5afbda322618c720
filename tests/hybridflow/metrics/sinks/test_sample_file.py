"""Samples as texts: what is written of them, and what a resumed run keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.metrics.sinks.sample_file import SampleText
from hybridflow.trainer.samples.texts import shortened

ONLY_SAMPLES = MetricsConfig(console=False, jsonl=False, csv=False, tensorboard=False)


def a_sample(number: int, reward: float = 1.0) -> SampleText:
    return SampleText(f"{number}+1=", "ä\n", {"value": [number]}, reward, version=3, sample=number)


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def test_a_sample_is_a_line_and_a_resumed_run_makes_later_ones_again(tmp_path: Path) -> None:
    with Metrics(ONLY_SAMPLES, tmp_path) as log:
        for step in (1, 2, 3):
            log.log_samples(step, [a_sample(10 * step), a_sample(10 * step + 1, math.nan)])
            log.log_samples(step, [a_sample(10 * step + 2)])
    assert lines(tmp_path)[:2] == [
        {
            **{"phase": "train", "step": 1, "prompt": "10+1=", "response": "ä\n", "answer": {"value": [10]}},
            **{"reward": 1.0, "version": 3, "sample": 10},
        },
        lines(tmp_path)[0] | {"prompt": "11+1=", "answer": {"value": [11]}, "reward": "nan", "sample": 11},
    ]
    with Metrics(ONLY_SAMPLES, tmp_path, resume_from_step=2) as log:
        log.log_samples(3, [a_sample(99)])
    assert [line["sample"] for line in lines(tmp_path)] == [10, 11, 12, 20, 21, 22, 99]
    with pytest.raises(UserError, match=r"samples\.jsonl already holds"):
        Metrics(ONLY_SAMPLES, tmp_path)


def test_no_samples_are_no_file(tmp_path: Path) -> None:
    with Metrics(ONLY_SAMPLES.model_copy(update={"samples_per_step": 0}), tmp_path) as log:
        log.log_samples(1, [a_sample(1)])
    assert list(tmp_path.iterdir()) == []


def test_a_long_text_loses_its_middle() -> None:
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789x", 4) == "01 [... 7 characters ...] 9x"
    assert shortened("0123456789x", 5) == "012 [... 6 characters ...] 9x"
