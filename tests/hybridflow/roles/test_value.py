"""The role with a scalar head: scores, values, updates, against the same weights in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.value import explained_variance
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.metrics.names import COST_CRITIC, CRITIC
from hybridflow.roles.model import update_metrics
from hybridflow.roles.value import ValueWorker
from tests.support import tiny_families
from tests.support.called_group import CalledGroup
from tests.support.group_workers import cost_moments

pytestmark = pytest.mark.processes

CLIP = 0.2


@dataclass(frozen=True)
class Stage:
    """A critic in two pipeline stages, and its weights as transformers has them."""

    critic: CalledGroup
    model: Any


@pytest.fixture(scope="module")
def stage(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("value")
    model = tiny_families.make("qwen3-tied", directory / "model", value_head=True)
    layout = LayoutConfig(pp=2)
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1)
    pools = reserve(pool_devices({"critic": "cpu:0-1"}, {}, cluster_nodes()))
    with CalledGroup(
        "critic",
        ValueWorker,
        pools["critic"],
        layout.layout(2),
        directory / "model",
        TrainConfig(layout=layout, dtype="float32", micro_batch_tokens=12, optimizer=optimizer),
        trainable=True,
        seed=1,
        locations=[Location("node 0", f"cpu:{slot}") for slot in range(2)],
        log_dir=directory,
        environment=platform.training_environment(2),
    ) as critic:
        critic.start().result(300)
        yield Stage(critic, model)
    release(pools)


def a_batch() -> SampleBatch:
    """Five samples; the policy wrote all but one of the response tokens."""
    generator = torch.Generator().manual_seed(2)
    prompts, responses = (
        [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]
        for lengths in ([3, 1, 4, 2, 5], [4, 6, 1, 3, 2])
    )
    batch = SampleBatch.from_generations(
        prompts=prompts,
        responses=responses,
        logprobs=[[-1.0] * len(response) for response in responses],
        sample_ids=range(5),
        group_ids=range(5),
        prompt_indices=range(5),
        policy_versions=[1] * 5,
        finish_reasons=["stop"] * 5,
    )
    written = batch.response_mask.clone()
    written[4 + 2] = False  # of the second sample
    return batch.replace(response_mask=written)


def by_transformers(model: Any, batch: SampleBatch) -> tuple[list[Tensor], Tensor]:
    """Compute the head's output just before each response token of each sample, and at the end of it."""
    values, scores = [], []
    for prompt, response in zip(batch.prompts(), batch.responses(), strict=True):
        tokens = torch.tensor([prompt + response])
        said = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
        values.append(said[len(prompt) - 1 : -1])
        scores.append(model(tokens).logits[0, 0])
    return values, torch.stack(scores)


def test_scores_of_whole_responses(stage: Stage) -> None:
    batch = a_batch()
    _, expected = by_transformers(stage.model, batch)
    scores = stage.critic.score(RemoteBatch.of(batch)).per_sample()["score"]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected.detach(), atol=1e-4, rtol=1e-3)


def test_values_updates_and_moments_of_a_critic(stage: Stage) -> None:
    batch, critic = a_batch(), stage.critic
    rows, _ = by_transformers(stage.model, batch)
    expected = torch.cat(rows).detach()
    remote = RemoteBatch.of(batch)
    values = remote.with_columns(values=critic.values(remote)).fetch().values
    assert values is not None
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-3)

    # Nothing is to depend on what stands at a token that the policy did not write.
    written = batch.response_mask
    returns = (values + torch.linspace(-2, 3, len(values))).where(written, torch.nan)
    batch = batch.replace(values=values, returns=returns, cost_values=values + 5, cost_returns=2 * returns)
    remote = RemoteBatch.of(batch)
    remote = remote.with_per_sample(weights=sequence_weights(remote.per_sample[LOSS_TOKENS], "token-mean"))

    update = critic.update_values(remote, clip=CLIP, kind="reward").result()
    error = torch.cat(rows)[written] - returns[written]
    (error.square().mean() / 2).backward()
    gradients = [parameter.grad for parameter in stage.model.parameters() if parameter.grad is not None]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    result = update_metrics([update], CRITIC)
    assert result["critic/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert result["critic/value_loss"] == pytest.approx(float(error.square().mean() / 2), rel=1e-4)
    assert result["critic/value_mean"] == pytest.approx(float(values[written].mean()), rel=1e-4)
    assert result["critic/learning_rate"] == 0.0 and result["critic/clip_fraction"] < 1
    assert all(name.startswith(("critic/", "memory/critic_host_")) for name in result)

    critic.restart_schedule().result()  # so that this one leaves the weights as they are, too
    update = critic.update_values(remote, clip=CLIP, kind="cost").result()
    result = update_metrics([update], COST_CRITIC)
    low, high = values + 4.8, values + 5.2
    clipped = (values.clamp(low, high) - 2 * returns).square() > (values - 2 * returns).square()
    assert result["cost_critic/clip_fraction"] == pytest.approx(float(clipped[written].double().mean()))
    assert result["cost_critic/return_mean"] == pytest.approx(float(2 * returns[written].mean()), rel=1e-4)
    assert result["cost_critic/learning_rate"] == 0.0
    assert all(name.startswith(("cost_critic/", "memory/cost_critic_host_")) for name in result)

    shards = critic.apply(remote, function=cost_moments, arguments={}).notes()
    assert sum(shard.returns.count for shard in shards) == int(written.sum())
    left = (2 * returns - values - 5)[written].double()
    variance = 1 - float(left.var() / (2 * returns[written]).double().var())
    assert explained_variance(shards) == pytest.approx(variance, rel=1e-4)

    for _ in range(5):
        update = critic.update_values(remote, clip=None, kind="reward").result()
    result = update_metrics([update], CRITIC)
    assert result["critic/learning_rate"] == 0.01
    assert result["critic/value_loss"] < 0.9 * float(error.square().mean() / 2)
