"""The figures of a step's updates, against hand-computed ones."""

from __future__ import annotations

import dataclasses
import math

import pytest

from engine3d.models.experts.load_balance import Routing
from engine3d.models.experts.routing_replay import ReplayStats
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
    replay: ReplayStats | None = None,
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
        replay=replay,
    )


def test_throughput_counts_what_the_slowest_replica_takes_on_every_device() -> None:
    # Two optimizer steps on two replicas of four devices each: 8 devices for 3 + 1 seconds.
    steps = [[_update(30, 3.0), _update(10, 2.0)], [_update(20, 0.5), _update(20, 1.0)]]
    values = update_metrics(steps)
    assert values["train/device_tokens_per_sec"] == pytest.approx(80 / (8 * 4.0))
    assert values["train/mfu"] == pytest.approx(8000.0 / (8 * 4.0 * 1000.0))
    assert values["train/padding_share"] == 0.5
    assert values["train/optimizer_time_ms"] == pytest.approx(1000.0)  # of the slowest of each: 3 and 1 s
    assert "train/capacity_retries" not in values
    assert update_metrics([[_update(1, 1.0, again=1)] * 2, [_update(1, 1.0, again=0)]])["train/capacity_retries"] == 1
    assert "train/pipeline_bubble" not in values
    staged = [[dataclasses.replace(_update(1, 1.0), bubble=bubble)] for bubble in (0.25, 0.5)]
    assert update_metrics(staged)["train/pipeline_bubble"] == 0.375
    assert "train/split_share" not in values
    shared = [[dataclasses.replace(_update(1, 1.0), split_share=share) for share in (0.25, 0.75)]]
    assert update_metrics(shared)["train/split_share"] == 0.5
    assert values[ACTOR.gpu_memory] == 30
    assert values[ACTOR.gpu_reserved] == 60


def test_routes_are_compared_over_all_updates() -> None:
    # All ranks have the sums of all ranks.
    stats = [ReplayStats(decisions=100, missing=20, different=8), ReplayStats(decisions=300, missing=30, different=20)]
    values = update_metrics([[_update(1, 1.0, replay=update)] * 2 for update in stats])
    assert values["train/missing_route_share"] == pytest.approx(50 / 400)
    assert values["train/different_route_share"] == pytest.approx(28 / 350)
    none = update_metrics([[_update(1, 1.0, replay=ReplayStats(decisions=10, missing=10, different=0))]])
    assert none["train/missing_route_share"] == 1 and "train/different_route_share" not in none
    assert "train/missing_route_share" not in update_metrics([[_update(1, 1.0)]])


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
    # Of 16 tokens a layer, over 4 experts: the highest are 1.5, 2 and 1 times the mean, and then 2.5, 3 and 1.
    first = Routing((0, 2, 3), ((6, 2, 4, 4), (8, 1, 3, 4), (4, 4, 4, 4)), z=4.0, sequence=1.5)
    second = Routing((0, 2, 3), ((10, 2, 4, 0), (12, 2, 2, 0), (4, 4, 4, 4)), z=6.0, sequence=1.0)
    steps = [[_update(30, 3.0, routing=entry), _update(10, 2.0, routing=entry)] for entry in (first, second)]
    values = update_metrics(steps)
    assert values["train/expert_load_max"] == 2.5
    assert values["train/expert_load_max_layer"] == 2
    assert values["train/expert_load_max_mean"] == pytest.approx((2.0 + 2.5 + 1.0) / 3)
    assert values["train/expert_load_min"] == 0.0
    assert values["train/dead_experts"] == 0  # in the step
    layers = [(16, 4, 8, 4), (20, 3, 5, 4), (8, 8, 8, 8)]
    entropies = [-sum(load / 32 * math.log(load / 32, 4) for load in layer) for layer in layers]
    assert values["train/expert_load_entropy"] == pytest.approx(sum(entropies) / 3)
    assert values["train/expert_load_entropy_min"] == pytest.approx(min(entropies)) == pytest.approx(entropies[1])
    assert values["train/router_z_loss"] == 5.0
    assert values["train/sequence_balance_loss"] == 1.25
    assert "train/update_balance_loss" not in values  # its coefficient is 0
    assert update_metrics(steps, CRITIC)["critic/expert_load_max"] == 2.5
    assert not any("bias" in name for name in values)
    assert not any("expert" in name for name in update_metrics([[_update(30, 3.0)]]))


def test_dead_experts_and_biases_are_of_the_step() -> None:
    first = Routing((1, 2), ((4, 4, 0, 0), (2, 6, 0, 0)), ((0.5, 0.5, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5)))
    second = Routing((1, 2), ((8, 0, 0, 0), (0, 0, 8, 0)), ((0.5, 0.5, 0.6, 0.7), (0.4, 0.4, 0.5, 0.5)))
    values = update_metrics([[_update(30, 3.0, routing=entry)] for entry in (first, second)])
    assert values["train/dead_experts"] == 3
    assert values["train/expert_bias_spread"] == pytest.approx(0.2)
    assert values["train/expert_bias_spread_mean"] == pytest.approx(0.15)
