"""The figures of a step's updates, against hand-computed ones."""

from __future__ import annotations

import dataclasses

import pytest

from engine3d.models.experts.load_balance import Routing
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.metrics.names import ACTOR, CRITIC
from hybridflow.roles.model import Update, update_metrics


def _update(
    tokens: int,
    seconds: float,
    *,
    peak: float | None = 1000.0,
    applied: bool = True,
    routing: Routing | None = None,
    again: int | None = None,
) -> Update:
    return Update(
        statistics=Statistics(),
        grad_norm=2.0,
        learning_rate=0.1,
        applied=applied,
        tokens=tokens,
        positions=2 * tokens,
        peak_memory_bytes=tokens << 20,
        peak_reserved_bytes=tokens << 21,
        devices=4,
        flops=100.0 * tokens,
        seconds=seconds,
        optimizer_seconds=seconds / 4,
        peak_flops=peak,
        routing=routing,
        again=again,
    )


def test_throughput_counts_what_the_slowest_replica_takes_on_every_device() -> None:
    # Two optimizer steps on two replicas of four devices each: 8 devices for 3 + 1 seconds.
    steps = [[_update(30, 3.0), _update(10, 2.0)], [_update(20, 0.5), _update(20, 1.0)]]
    values = update_metrics(steps)
    assert values["train/device_tokens_per_sec"] == pytest.approx(80 / (8 * 4.0))
    assert values["train/mfu"] == pytest.approx(8000.0 / (8 * 4.0 * 1000.0))
    assert values["train/padding_share"] == 0.5
    assert values["train/optimizer_time_ms"] == pytest.approx(1000.0)  # of the slowest of each: 3 and 1 s
    assert "train/computed_again" not in values
    assert update_metrics([[_update(1, 1.0, again=1)] * 2, [_update(1, 1.0, again=0)]])["train/computed_again"] == 1
    assert values[ACTOR.gpu_memory] == 30
    assert values[ACTOR.gpu_reserved] == 60


def test_a_cpu_has_no_memory_of_a_gpu() -> None:
    values = update_metrics([[dataclasses.replace(_update(30, 3.0), on_gpu=False)]])
    assert values["memory/actor_host_mem_mb"] == 30
    assert not [name for name in values if "gpu" in name]


def test_a_device_of_unknown_speed_has_no_utilisation() -> None:
    values = update_metrics([[_update(30, 3.0, peak=None)], [_update(30, 3.0, peak=None, applied=False)]], CRITIC)
    assert "critic/mfu" not in values
    assert values["critic/device_tokens_per_sec"] == pytest.approx(60 / (4 * 6.0))
    assert values["critic/skipped_updates"] == 1


def test_loads_and_losses_of_routers_are_means_over_updates() -> None:
    first = Routing((0, 2, 3), (1.5, 2.0, 1.0), (0.5, 0.25, 0.75), z=4.0, sequence=1.5, update=None)
    second = Routing((0, 2, 3), (2.5, 3.0, 1.0), (0.5, 0.5, 0.125), z=6.0, sequence=1.0, update=None)
    steps = [[_update(30, 3.0, routing=each), _update(10, 2.0, routing=each)] for each in (first, second)]
    values = update_metrics(steps)
    assert values["train/expert_load_max"] == 2.5
    assert values["train/expert_load_max_layer"] == 2
    assert values["train/expert_load_max_mean"] == pytest.approx((2.0 + 2.5 + 1.0) / 3)
    assert values["train/expert_load_min"] == 0.125
    assert values["train/router_z_loss"] == 5.0
    assert values["train/sequence_balance_loss"] == 1.25
    assert "train/update_balance_loss" not in values  # its coefficient is 0
    assert update_metrics(steps, CRITIC)["critic/expert_load_max"] == 2.5
    assert not any("expert" in name for name in update_metrics([[_update(30, 3.0)]]))
