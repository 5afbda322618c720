"""Work of a step: models with what each does, prompts, and lengths of responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from engine3d.models import ModelSpec
from engine3d.training.config import TrainConfig
from engine3d.training.flops import sequence_flops, update_flops

_HALVINGS = 60
"""Times that the interval of a median is halved."""


@dataclass(frozen=True)
class RoleWork:
    """A Megatron-Core model and its work in a step.

    Args:
        role: its name.
        spec: the model.
        config: of its training, with the settings that no search changes.
        trained: it is updated.
        passes: forward passes over all samples before the updates.
        setting: of its training in the recipe, such as "train".
    """

    role: str
    spec: ModelSpec
    config: TrainConfig
    trained: bool
    passes: int
    setting: str = "train"


@dataclass(frozen=True)
class Workload:
    """Work of a step.

    Args:
        roles: Megatron-Core models, the actor first.
        prompts: of a step.
        samples: responses to each.
        prompt: mean tokens of a prompt.
        longest_prompt: tokens of the longest.
        lengths: tokens of responses, as any number of equally frequent values.
        longest: most tokens of a response.
        mini_batches, epochs: of a step's updates.
        generates: engines generate the responses.
        staleness: updates by which the weights of engines on their own devices may be behind.
    """

    roles: tuple[RoleWork, ...]
    prompts: int
    samples: int
    prompt: float
    longest_prompt: int
    lengths: tuple[float, ...]
    longest: int
    mini_batches: int = 1
    epochs: int = 1
    generates: bool = True
    staleness: int = 0

    @property
    def actor(self) -> RoleWork:
        return self.roles[0]

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def tokens(self) -> int:
        """Mean tokens of a sequence."""
        return max(1, round(self.prompt + self.response))

    @property
    def longest_sequence(self) -> int:
        return self.longest_prompt + self.longest

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step's updates and scoring passes, without recomputation and generation."""
        total = 0.0
        for work in self.roles:
            total += work.passes * float(sequence_flops(work.spec, self.tokens)) * self.sequences
            if work.trained:
                adapters = work.config.lora is not None
                total += self.epochs * float(update_flops(work.spec, self.tokens, adapters=adapters)) * self.sequences
        return total


def drawn_lengths(mean: float, longest: int, spread: float, count: int = 64) -> tuple[float, ...]:
    """Quantiles of a log-normal distribution of lengths that is cut at the longest, and has a mean after that.

    Args:
        mean: tokens, with what is cut.
        longest: most tokens.
        spread: standard deviation of the logarithm: 0 for equal lengths, about 0.8 for reasoning.
        count: of the values.
    """
    if spread <= 0:
        return (min(mean, float(longest)),)
    factors = [math.exp(spread * _normal((index + 0.5) / count)) for index in range(count)]

    def cut(median: float) -> tuple[float, ...]:
        return tuple(min(float(longest), max(1.0, median * factor)) for factor in factors)

    low, high = 0.0, longest / factors[0]
    for _ in range(_HALVINGS):
        median = (low + high) / 2
        low, high = (median, high) if sum(cut(median)) < mean * count else (low, median)
    return cut(high)


def _normal(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)
