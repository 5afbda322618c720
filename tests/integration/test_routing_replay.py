"""Whole runs with routing replay: a stream's routes, and those of old log-probs. See also `test_replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.proves import proves
from tests.support.runs import records, rewarded_by_length, run

pytestmark = pytest.mark.processes
STEPS = 2
SETTINGS = ["warmup=null", f"trainer.steps={STEPS}", "trainer.epochs=2", "evaluation.eval=null"]
ON_TWO_RANKS = "ep dp padding routing_replay resharding"


def _steps(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    outcome = run(directory, *SETTINGS, *overrides, rewarded_by_length(directory))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    steps = records(directory / "small", "train")
    assert len(steps) == STEPS
    return steps


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _steps(tmp_path_factory.mktemp("rollout"), "train.routing_replay=rollout")


@proves("qwen3_moe", f"{ON_TWO_RANKS} streams")
@pytest.mark.release
def test_a_stream_without_staleness_makes_the_same_steps(replayed: list[dict[str, Any]], tmp_path: Path) -> None:
    streamed = _steps(tmp_path, "train.routing_replay=rollout", "rollout.stream={}", "placement.rollout=cpu:2")
    for step, plain in zip(streamed, replayed, strict=True):
        for name in ("train/loss", "train/gradient_norm", "train/missing_route_share", "reward/mean"):
            assert step[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
def test_updates_replay_the_routes_of_old_log_probs(tmp_path: Path) -> None:
    for step in _steps(tmp_path, "train.routing_replay=update", "train.optimizer.lr=1e-2"):
        assert step["train/missing_route_share"] == 0
        assert 0 < step["train/different_route_share"] < 0.5
        assert "rollout/missing_routes_share" not in step


@pytest.mark.release
def test_routes_are_compared_where_none_are_replayed(tmp_path: Path) -> None:
    first, _ = _steps(tmp_path, "rollout.engine.routes=true")
    assert first["train/missing_route_share"] == 0
    assert 0 <= first["train/different_route_share"] < 0.1
