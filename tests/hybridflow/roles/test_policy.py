"""An actor's update by the loss of every algorithm: the same on every layout, packed or padded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.layout import Layout
from engine3d.reshard.describe.shards import Place
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.metrics import names as metrics
from hybridflow.roles.packing import to_sequences
from hybridflow.roles.policy import PolicyWorker
from hybridflow.workers.context import WorkerContext
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.facts_step import make_samples

pytestmark = pytest.mark.processes

SAMPLES, LIMIT = 10, 9
LAYOUTS: dict[int, list[tuple[dict[str, int], int, bool]]] = {
    1: [({}, 10_000, False), ({}, 40, True)],
    2: [({}, 40, True), ({"tp": 2}, 40, True), ({"pp": 2}, 40, False)],
}
"""For each number of ranks the layouts, the tokens of a micro-batch, and whether samples are packed."""
LOSSES = [
    name
    for name in ALGORITHMS
    if load(name).preference_loss is None
    and (name in ("grpo", "rloo", "dr_grpo") or load(name).policy_loss is not clipped_loss)
]
"""Every loss once, but those of pairs, and PPO's surrogate in every aggregation that is somebody's default."""
OF_CHOSEN = "distillation of chosen tokens"
"""The divergence from the teacher as the loss, over several tokens in the place of each."""
LOSSES.append(OF_CHOSEN)
CHOSEN, VOCABULARY = 5, 96
ONLY = {"clip_cov": ("selected",), "kl_cov": ("selected",), "vapo": ("lm_weights",)}
"""Columns that one algorithm reads; that of distillation has those of a teacher."""
TEACHER = ("teacher_logprobs", "teacher_agrees")
OF_TEACHER = {"distillation": TEACHER, OF_CHOSEN: (*TEACHER, "chosen_tokens", "teacher_chosen_logprobs")}


def a_batch(name: str, config: Any) -> SampleBatch:
    """A mini-batch with all that a loss may read."""
    torch.manual_seed(3)
    batch = make_samples([0] * SAMPLES, [0.0] * SAMPLES, longest=LIMIT)
    count = len(batch.logprobs)
    old = -3.8 + 0.5 * torch.randn(count)  # as likely as tokens are to a policy that knows nothing
    columns = {
        "old_logprobs": old,
        "logprobs": old + 0.1 * torch.randn(count),
        "ref_logprobs": old + 0.2 * torch.randn(count),
        "advantages": torch.randn(SAMPLES).repeat_interleave(batch.response_lengths),
        "correction_weights": torch.rand(count) + 0.5,
        "selected": (torch.rand(count) < 0.3).float(),
        "lm_weights": (torch.rand(SAMPLES) < 0.5).float().repeat_interleave(batch.response_lengths),
        "teacher_logprobs": old + 0.3 * torch.randn(count),
        "teacher_agrees": (torch.rand(count) < 0.3).float(),
        "chosen_tokens": torch.rand(count, VOCABULARY).topk(CHOSEN).indices,
        "teacher_chosen_logprobs": torch.randn(count, CHOSEN).log_softmax(-1) - 0.1,
    }
    readers = ONLY | OF_TEACHER
    spare = {each for other in readers.values() for each in other} - set(readers.get(name, ()))
    counts = batch.sums(batch.response_mask).to(torch.int64)
    weights = sequence_weights(
        counts, config.loss_aggregation, normalising_length=config.normalising_length(LIMIT)
    ).repeat_interleave(batch.response_lengths)
    return batch.replace(
        **{key: column for key, column in columns.items() if key not in spare},
        weights=weights.where(batch.response_mask, 0.0),
    )


def settings_of(name: str) -> Any:
    common = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.01}
    if name == OF_CHOSEN:
        own = {"divergence_in": "loss", "divergence": "jsd", "top_k": CHOSEN, "reward_coef": 0.5}
        return load("distillation").settings(**common, **own)
    clip = {"clip_low": 0.2, "clip_high": 0.3} if name.startswith("gspo") else {}
    return load(name).settings(**common, **clip)


def _updates(
    directory: Path, sizes: dict[str, int], world_size: int, micro_batch_tokens: int, packing: bool
) -> dict[str, tuple[Statistics, float]]:
    """What this rank tells of one update by each loss, from the same weights."""
    rank, layout = int(os.environ["RANK"]), Layout.of_world(world_size, **sizes)
    context = WorkerContext("actor", rank, rank, layout, layout.coordinates(rank), (rank,), "", None)
    config = TrainConfig(
        layout=LayoutConfig(**sizes),
        dtype="float32",
        micro_batch_tokens=micro_batch_tokens,
        packing=packing,
        optimizer=OptimizerConfig(lr=1e-30, clip_grad=0),
    )
    places = [Place("node 0", f"cpu:{slot}") for slot in range(world_size)]
    worker = PolicyWorker(context, directory, config, trainable=True, seed=1, places=places)
    worker.start()
    worker.take_back()
    found, replica = {}, context.coordinates.dp
    # The last rank has one sample, and empty micro-batches while the other still has samples.
    rows = [range(SAMPLES)] if layout.dp == 1 else [range(SAMPLES - 1), range(SAMPLES - 1, SAMPLES)]
    for name in LOSSES:
        algorithm = settings_of(name)
        own = a_batch(name, algorithm).select(rows[replica])
        empty = [not batch.indices for batch in worker._engine.micro_batches(to_sequences(own))]
        assert any(empty) == (replica > 0)
        update = worker.update(own, algorithm=algorithm, temperature=1.0)
        found[name] = update.statistics, update.grad_norm
    worker._engine.close()
    return found


def _updates_all(directory: Path, world_size: int) -> list[tuple[int, dict[str, tuple[Statistics, float]]]]:
    """Of each layout, with the data-parallel rank; statistics are those of the last pipeline stage."""
    found = []
    for sizes, micro_batch_tokens, packing in LAYOUTS[world_size]:
        coordinates = Layout.of_world(world_size, **sizes).coordinates(int(os.environ["RANK"]))
        found.append((coordinates.dp, _updates(directory, sizes, world_size, micro_batch_tokens, packing)))
    return found


@pytest.mark.long
def test_every_loss_updates_alike_on_every_layout(tmp_path: Path) -> None:
    """Beside one rank that reads padded rows in one micro-batch: ranks with parts of them, packed into several."""
    tiny_families.make("qwen3_moe", tmp_path / "moe")
    ranks = {size: run_distributed(_updates_all, size, tmp_path / "moe", size, timeout_s=300) for size in LAYOUTS}
    _, alone = ranks[1][0][0]
    for world_size, layouts in LAYOUTS.items():
        for number, layout in enumerate(layouts):
            # The last rank of each replica: that of the last stage.
            replicas = dict(rank[number] for rank in ranks[world_size])
            for name, (statistics, norm) in alone.items():
                merged = Statistics.merge(updates[name][0] for updates in replicas.values()).values()
                assert merged == pytest.approx(statistics.values(), rel=2e-4, abs=2e-6), (name, layout)
                for updates in replicas.values():
                    assert updates[name][1] == pytest.approx(norm, rel=2e-4), (name, layout)
                assert norm > 0
    losses = {name: statistics.values()[metrics.TRAIN_LOSS] for name, (statistics, _) in alone.items()}
    same = {
        ("gpg", "opo"),
        ("gspo", "gspo_token"),
    }  # in value, as one aggregation and one advantage a response are given
    assert len(set(losses.values())) >= len(LOSSES) - len(same)
