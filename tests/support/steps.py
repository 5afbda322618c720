"""A step whose engines and models are numbers: what an algorithm composes of it, without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.base import Applied, Experience, Step
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.worker_output import Columns, pack
from hybridflow.data.prompts import Draw, Prompts

Reward = float | None
"""None where a sample gets none."""


@dataclass
class NumberedStep(Step[Any]):
    """One step. Sample k of group g has the reward, and the length, that functions of (g, k) say.

    Args:
        settings: of the algorithm.
        reward: of a sample.
        length: tokens of a response; one of `limit` tokens is truncated.
        prompts: of a step.
        samples: of each prompt.
        least: samples of an update.
        engines: each of which gets a prompt.
        position: the group of the next prompt, which goes on from step to step.
        kept: the replay buffer.
    """

    settings: AlgorithmSettings
    reward: Callable[[int, int], Reward]
    length: Callable[[int, int], int] = lambda group, sample: 3
    prompts: int = 4
    samples: int = 4
    least: int = 2
    engines: int = 1
    limit: int = 8
    number: int = 1
    position: int = 0
    kept: ReplayBuffer | None = None
    values: dict[str, float] = field(default_factory=dict)
    draws: list[int] = field(default_factory=list)
    """Prompts of each draw."""
    recalled: list[SampleBatch] = field(default_factory=list)
    updated: list[Experience] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    responses: ClassVar[dict[int, tuple[SampleBatch, int]]] = {}
    """Every sample that was ever generated, by its id, as a row of a batch: what `fetched` finds."""

    @property
    def config(self) -> Any:
        return self.settings

    @property
    def multiplier(self) -> LagrangeMultiplier:
        raise NotImplementedError

    @property
    def replay(self) -> ReplayBuffer:
        assert self.kept is not None
        return self.kept

    @property
    def prompts_per_step(self) -> int:
        return self.prompts

    @property
    def least_prompts(self) -> int:
        return self.engines

    def response_limits(self, batch: RemoteBatch) -> torch.Tensor:
        return torch.full((len(batch),), self.limit)

    @property
    def least_samples(self) -> int:
        return self.least

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.number + len(name))

    def draw(self, count: int | None = None) -> Draw:
        count = self.prompts if count is None else count
        assert count >= self.engines
        first, self.position = self.position, self.position + count
        self.draws.append(count)
        return Draw(Prompts([], []), range(first, self.position), range(first, self.position))

    def given(self, draw: Draw) -> RemoteBatch:
        raise NotImplementedError

    def log(self, stats: Mapping[str, Tensor]) -> None:
        self.values |= {name: float(column.mean()) for name, column in stats.items()}

    def generate(self, draw: Draw) -> RemoteBatch:
        self.calls.append("generate")
        samples = [(draw.groups[row], k) for row in range(len(draw.indices)) for k in range(self.samples)]
        lengths = [self.length(*sample) for sample in samples]
        made = SampleBatch.from_generations(
            prompts=[[5, 6]] * len(samples),
            responses=[list(range(length)) for length in lengths],
            logprobs=[[-0.5] * length for length in lengths],
            sample_ids=[100 * group + k for group, k in samples],
            group_ids=[group for group, _ in samples],
            prompt_indices=[group for group, _ in samples],
            policy_versions=[self.number] * len(samples),
            finish_reasons=[FinishReason.LENGTH if length >= self.limit else FinishReason.STOP for length in lengths],
            engine=0,
            times=[(float(group), group + 0.5) for group, _ in samples],
        )
        return self._remote(made)

    def recall(self, samples: SampleBatch) -> RemoteBatch:
        self.calls.append("recall")
        self.recalled.append(samples)
        return self._remote(samples)

    def _remote(self, samples: SampleBatch) -> RemoteBatch:
        _, summary = pack(samples)
        assert summary is not None
        for row, sample in enumerate(samples.sample_ids.tolist()):
            self.responses[sample] = samples, row
        return RemoteBatch(summary.per_sample, [])

    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        raise NotImplementedError

    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        self.calls.append("logprobs")
        return batch

    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        raise NotImplementedError

    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        self.calls.append("critic_values")
        return batch

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, partial: bool = False) -> RemoteBatch:
        self.calls.append("rewards")
        rewards = [self.reward(sample // 100, sample % 100) for sample in batch.per_sample["sample_ids"].tolist()]
        kept = [row for row, reward in enumerate(rewards) if reward is not None]
        assert partial or len(kept) >= self.least
        return batch.select(kept).with_per_sample(
            rewards=torch.tensor([rewards[row] for row in kept], dtype=torch.float32)
        )

    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        raise NotImplementedError

    def estimate(
        self, batch: RemoteBatch, function: Callable[..., Columns], role: str, **arguments: float
    ) -> tuple[RemoteBatch, Moments]:
        self.calls.append("estimate")
        return batch, Moments(1, 0.0, 1.0)

    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Applied:
        raise NotImplementedError

    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        raise NotImplementedError

    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        return 0.0

    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        self.updated.append(experience)


def fetched(batch: RemoteBatch) -> SampleBatch:
    """The tokens of a batch of a `NumberedStep`, with its per-sample rewards."""
    responses = [NumberedStep.responses[sample] for sample in ids(batch)]
    rows = [samples.select([row]).replace(rewards=None) for samples, row in responses]
    return SampleBatch.concatenate(rows).replace(rewards=batch.per_sample["rewards"])


def ids(batch: RemoteBatch | SampleBatch | None) -> Sequence[int]:
    """The samples of a batch."""
    if batch is None:
        return []
    sample_ids = batch.per_sample["sample_ids"] if isinstance(batch, RemoteBatch) else batch.sample_ids
    return list(sample_ids.tolist())
