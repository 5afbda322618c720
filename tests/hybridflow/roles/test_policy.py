"""An actor's update by the loss of every algorithm: the same on every layout, packed or padded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.reshard.describe.shards import Location
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import pack
from hybridflow.metrics import names as metrics
from hybridflow.roles.model import to_sequences
from hybridflow.roles.policy import PolicyWorker
from hybridflow.workers.context import WorkerContext
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.local_step import make_samples

pytestmark = pytest.mark.processes

SAMPLES, LIMIT = 10, 9
SERVING = 7
"""Version of the weights before the step."""
STILL = OptimizerConfig(lr=1e-30, clip_grad=0)
LAYOUTS: dict[int, list[tuple[dict[str, Any], int, bool]]] = {
    1: [({}, 10_000, False), ({}, 40, True)],
    2: [({}, 40, True), ({"tp": 2}, 40, True), ({"pp": 2}, 40, False)],
}
"""Layouts by number of ranks, with the tokens of a micro-batch and whether samples are packed."""
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
    spare = {entry for other in readers.values() for entry in other} - set(readers.get(name, ()))
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
        local = {"divergence_in": "loss", "divergence": "jsd", "top_k": CHOSEN, "reward_coef": 0.5}
        return load("distillation").settings(**common, **local)
    clip = {"clip_low": 0.2, "clip_high": 0.3} if name.startswith("gspo") else {}
    return load(name).settings(**common, **clip)


def _worker(directory: Path, layout: Layout, config: TrainConfig) -> PolicyWorker:
    """Started worker of this rank."""
    rank = int(os.environ["RANK"])
    context = WorkerContext("actor", rank, rank, layout, layout.coordinates(rank), (rank,), "", None)
    locations = [Location("node 0", f"cpu:{slot}") for slot in range(layout.world_size)]
    worker = PolicyWorker(context, directory, config, trainable=True, seed=1, locations=locations)
    worker.start()
    worker.onload()
    return worker


def _updates(
    directory: Path, sizes: dict[str, Any], world_size: int, micro_batch_tokens: int, packing: bool
) -> dict[str, tuple[Statistics, float]]:
    """Return this rank's result of one update by each loss, from the same weights."""
    layout = Layout.of_world(world_size, **sizes)
    config = TrainConfig(
        layout=LayoutConfig(**sizes),
        dtype="float32",
        micro_batch_tokens=micro_batch_tokens,
        packing=packing,
        optimizer=STILL,
    )
    worker = _worker(directory, layout, config)
    results, replica = {}, layout.coordinates(int(os.environ["RANK"])).dp
    # The last rank has one sample, and empty micro-batches while the other still has samples.
    rows = [range(SAMPLES)] if layout.dp == 1 else [range(SAMPLES - 1), range(SAMPLES - 1, SAMPLES)]
    for name in LOSSES:
        algorithm = settings_of(name)
        local = a_batch(name, algorithm).select(rows[replica])
        empty = [not batch.indices for batch in worker._engine.micro_batches(to_sequences(local))]
        assert any(empty) == (replica > 0)
        update = worker.update(local, algorithm=algorithm, temperature=1.0, serving=0)
        results[name] = update.statistics, update.grad_norm
    worker._engine.close()
    return results


def _updates_all(directory: Path, world_size: int) -> list[tuple[int, dict[str, tuple[Statistics, float]]]]:
    """Return the updates of each layout with the data-parallel rank. The last pipeline stage has the statistics."""
    results = []
    for sizes, micro_batch_tokens, packing in LAYOUTS[world_size]:
        coordinates = Layout.of_world(world_size, **sizes).coordinates(int(os.environ["RANK"]))
        results.append((coordinates.dp, _updates(directory, sizes, world_size, micro_batch_tokens, packing)))
    return results


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


def _of_versions(batch: SampleBatch) -> SampleBatch:
    """The same samples, drawn by five versions in turn."""
    versions = SERVING - 2 + torch.arange(len(batch.logprobs)) % 5
    newest = torch.stack([of_sample.max() for of_sample in versions.split(batch.response_lengths.tolist())])
    return batch.replace(token_versions=versions, newest_versions=newest)


def _routed(directory: Path, dtype: str) -> dict[str, Any]:
    """Log-probs and updates in each mode of routing replay, from the same weights."""
    grpo, seen = settings_of("grpo"), dict[str, Any]()
    batch = a_batch("grpo", grpo)
    generator = torch.Generator().manual_seed(4)
    forced = torch.rand(len(batch.tokens), 3, 8, generator=generator).topk(3).indices.flatten(1).to(torch.uint8)
    batch = _of_versions(batch)
    for name in ("none", "update", "rollout, live", "rollout"):
        mode, *live = name.split(", ")
        settings: dict[str, Any] = {"routing_replay": mode, "older_routes": "live" if live else "keep"}
        config = TrainConfig(dtype=dtype, micro_batch_tokens=40, optimizer=STILL, **settings)
        worker = _worker(directory, Layout(), config)
        given = batch if mode == "none" else batch.replace(routes=forced)
        log: dict[str, Any] = {"temperature": 1.0, "column": "old_logprobs", "records_routes": mode == "update"}
        columns = worker.actor_logprobs(given, serving=SERVING, **log)
        assert columns is not None
        pack(columns, [given])
        seen[name] = columns.tokens
        routes = forced if mode == "none" else columns.tokens.get("routes", forced)
        learned = batch.replace(routes=routes, old_logprobs=columns.tokens["old_logprobs"])
        update = worker.update(learned, algorithm=grpo, temperature=1.0, serving=SERVING)
        seen[f"{name} update"] = update.grad_norm, update.replay
        seen[f"{name} supervised"] = worker.supervise(batch).grad_norm
        if live:
            older = worker.actor_logprobs(given, serving=SERVING + 9, **log)
            assert older is not None
            seen["all older"] = older.tokens["old_logprobs"]
        elif mode == "rollout":
            broken = forced.clone()
            broken[len(batch.prompts()[0]) + 1, 4] = broken[len(batch.prompts()[0]) + 1, 3]
            for samples in (batch, batch.replace(routes=broken)):
                try:
                    worker.actor_logprobs(samples, serving=SERVING, **log)
                except (EngineError, UserError) as error:
                    seen.setdefault("errors", []).append(str(error))
        worker._engine.close()
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_replay_routes_of_old_logprobs_or_of_engines(tmp_path: Path, dtype: str) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "moe")
    [seen] = run_distributed(_routed, 1, tmp_path / "moe", dtype, timeout_s=300)
    assert set(seen["none"]) == set(seen["rollout"]) == {"old_logprobs"}
    assert set(seen["update"]) == {"old_logprobs", "routes"}
    plain = seen["none"]["old_logprobs"]
    assert torch.equal(seen["update"]["old_logprobs"], plain)
    assert (seen["rollout"]["old_logprobs"] - plain).abs().max() > 1e-3
    (norm, compared), (live_norm, live), (forced_norm, forced) = (
        seen[f"{mode} update"] for mode in ("none", "update", "rollout")
    )
    # The old log-probs are those of the update itself, so that its loss is the plain one.
    assert live_norm == norm and (live.missing, live.different) == (0, 0)
    assert compared.decisions == forced.decisions == live.decisions and compared.different > 0.9 * compared.decisions
    assert abs(forced_norm - norm) > 1e-3 * norm
    assert seen["none supervised"] == seen["update supervised"] == seen["rollout supervised"]
    batch = _of_versions(a_batch("grpo", settings_of("grpo")))
    # Routers choose for the tokens before those that older weights drew. The prompt was read before the first one.
    assert batch.token_versions is not None
    older = [(row < SERVING).tolist() for row in batch.token_versions.split(batch.response_lengths.tolist())]
    count = sum(sum(row) + (int(prompt) - 1) * row[0] for row, prompt in zip(older, batch.prompt_lengths, strict=True))
    partly = seen["rollout, live update"][1]
    assert 0 < count < partly.decisions / 3 and (partly.missing, forced.missing) == (3 * count, 0)
    assert torch.equal(seen["all older"], plain)
    assert not torch.equal(seen["rollout, live"]["old_logprobs"], seen["rollout"]["old_logprobs"])
    prompt = len(batch.prompts()[0])
    expert = seen["errors"][1].split("name expert ")[1].split()[0]
    assert seen["errors"] == [
        "actor rank 0: routing_replay=rollout with samples that have no routes, expected routes",
        f"sample {int(batch.sample_ids[0])}: routes of token {prompt + 1}, layer 2 name expert {expert} twice, "
        "expected 3 different ones",
    ]


def test_routers_choose_for_tokens_of_older_weights_only_where_routes_are_replayed() -> None:
    with pytest.raises(ValidationError, match="older_routes=live needs routing_replay=rollout, found update"):
        TrainConfig(routing_replay="update", older_routes="live")
