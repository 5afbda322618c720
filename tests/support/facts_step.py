"""A step without roles: the advantages and the loss that an algorithm without critic makes of given samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from hybridflow.batch.worker_output import COUNTED, Columns, pack


@dataclass
class FactsStep:
    """As much of a `Step` as such an algorithm asks for.

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
        found: Tensor = self.config.kl_coef * sequence_kl(self.samples, config=self.config).facts["kl"]
        return found

    def estimate(self, batch: RemoteBatch, function: Callable[..., Columns], role: str) -> tuple[RemoteBatch, Moments]:
        assert role == "actor"
        rows = [range(rank, len(self.samples), self.ranks) for rank in range(self.ranks)]
        found = [function(self.samples.select(list(part)), config=self.config) for part in rows]
        pieces: list[Tensor] = [torch.empty(0)] * len(self.samples)
        for part, columns in zip(rows, found, strict=True):
            lengths = self.samples.response_lengths[list(part)].tolist()
            for row, piece in zip(part, columns.tokens["advantages"].split(lengths), strict=True):
                pieces[row] = piece
        self.estimated = torch.cat(pieces)
        return batch, Moments.merge(columns.note.advantages for columns in found)


def advantages_of(samples: SampleBatch, config: AlgorithmSettings, *, ranks: int = 1) -> tuple[Tensor, FactsStep]:
    """(R,) the advantages that the actor learns from, whitened where the algorithm whitens; and the step."""
    step: Any = FactsStep(config, samples, ranks)
    _, summary = pack(samples)
    assert summary is not None
    experience = load(config.name).with_advantages(step, Experience(RemoteBatch(summary.facts, [])))
    found = step.estimated
    if found is None:
        each = experience.batch.facts["advantages"].repeat_interleave(samples.response_lengths)
        found = each.where(samples.response_mask, 0.0)
    return found if experience.whiten is None else whiten(found, samples.response_mask, experience.whiten), step


def weights_of(samples: SampleBatch, config: AlgorithmSettings, limit: int) -> Tensor:
    """(R,) what each token weighs, where all samples are one mini-batch."""
    _, summary = pack(samples)
    assert summary is not None
    each = sequence_weights(
        summary.facts[COUNTED], config.loss_aggregation, normalising_length=config.normalising_length(limit)
    )
    return each.repeat_interleave(samples.response_lengths).where(samples.response_mask, 0.0)


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
