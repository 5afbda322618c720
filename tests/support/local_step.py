"""A step without roles: the advantages and the loss that an algorithm without critic makes of given samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.whitening import Moments, whiten
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.algorithms.kl_control import sequence_kl
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.losses.policy import policy_gradient_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS, Columns, pack


@dataclass
class LocalStep:
    """Stand-in for a `Step`, with as much of it as these algorithms use.

    Args:
        config: the algorithm's settings.
        samples: with rewards.
        ranks: on how many an `estimate` is made, sample by sample in turns.
    """

    config: Any
    samples: SampleBatch
    ranks: int = 1
    values: dict[str, float] = field(default_factory=dict)
    estimated: Tensor | None = None
    """(R,) advantages of an `estimate`."""

    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        if not (self.config.needs_reference and self.config.kl_in == "reward"):
            return 0.0
        penalty: Tensor = self.config.kl_coef * sequence_kl(self.samples, config=self.config).per_sample["kl"]
        return penalty

    def estimate(self, batch: RemoteBatch, function: Callable[..., Columns], role: str) -> tuple[RemoteBatch, Moments]:
        assert role == "actor"
        rows = [range(rank, len(self.samples), self.ranks) for rank in range(self.ranks)]
        estimates = [function(self.samples.select(list(chunk)), config=self.config) for chunk in rows]
        by_row: list[Tensor] = [torch.empty(0)] * len(self.samples)
        for chunk, columns in zip(rows, estimates, strict=True):
            lengths = self.samples.response_lengths[list(chunk)].tolist()
            for row, advantages in zip(chunk, columns.tokens["advantages"].split(lengths), strict=True):
                by_row[row] = advantages
        self.estimated = torch.cat(by_row)
        return batch, Moments.merge(columns.note.advantages for columns in estimates)

    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Any:
        self.estimated = function(self.samples, config=self.config, **arguments).tokens["advantages"]
        return SimpleNamespace(refs=[], nodes=[], shard_indices=[], sample_ids=batch.per_sample["sample_ids"])


def advantages_of(samples: SampleBatch, config: AlgorithmSettings, *, ranks: int = 1) -> tuple[Tensor, LocalStep]:
    """(R,) the advantages that the actor learns from, whitened where the algorithm whitens; and the step."""
    step: Any = LocalStep(config, samples, ranks)
    _, summary = pack(samples)
    assert summary is not None
    experience = load(config.name).with_advantages(step, Experience(RemoteBatch(summary.per_sample, [])))
    estimated = step.estimated
    if estimated is None:
        by_token = experience.batch.per_sample["advantages"].repeat_interleave(samples.response_lengths)
        estimated = by_token.where(samples.response_mask, 0.0)
    return estimated if experience.whiten is None else whiten(estimated, samples.response_mask, experience.whiten), step


def weights_of(samples: SampleBatch, config: AlgorithmSettings, limit: int) -> Tensor:
    """(R,) what each token weighs, where all samples are one mini-batch."""
    _, summary = pack(samples)
    assert summary is not None
    by_sequence = sequence_weights(
        summary.per_sample[LOSS_TOKENS], config.loss_aggregation, normalising_length=config.normalising_length(limit)
    )
    return by_sequence.repeat_interleave(samples.response_lengths).where(samples.response_mask, 0.0)


def loss_of(config: AlgorithmSettings, columns: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, Statistics]:
    """The loss of an algorithm's actor for columns of any shape, `logprobs` among them."""
    others = {name: column for name, column in columns.items() if name != "logprobs"}
    return policy_gradient_loss(
        columns["logprobs"], weights=weights, config=config, policy_loss=load(config.name).policy_loss, **others
    )


def make_samples(groups: Sequence[int], rewards: Sequence[float], *, longest: int = 6) -> SampleBatch:
    """Samples of these groups, of random lengths, log-probs and masks; each has a token that the policy wrote."""
    count = len(groups)
    lengths = torch.randint(1, longest + 1, (count,)).tolist()
    masks = [[True, *(torch.rand(length - 1) < 0.8).tolist()] for length in lengths]
    return SampleBatch.from_generations(
        prompts=[[3, 4]] * count,
        responses=[list(range(length)) for length in lengths],
        logprobs=[(-2 * torch.rand(length)).tolist() for length in lengths],
        sample_ids=list(range(count)),
        group_ids=groups,
        prompt_indices=groups,
        policy_versions=[0] * count,
        finish_reasons=["stop"] * count,
        response_masks=masks,
    ).replace(rewards=torch.tensor(rewards, dtype=torch.float32))
