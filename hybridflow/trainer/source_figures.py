"""Rewards by the source of the data that a prompt is of."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from hybridflow.data.prompts import Prompts
from hybridflow.metrics import names


@dataclass
class SourceFigures:
    """Sums over the samples of a step, by the index of their prompt."""

    _samples: Counter[int] = field(default_factory=Counter)
    _rewards: dict[int, float] = field(default_factory=dict)

    def add(self, prompts: Tensor, rewards: Tensor) -> None:
        """Samples that were scored.

        Args:
            prompts: (B,) indices of their prompts.
            rewards: (B,).
        """
        for prompt, reward in zip(prompts.tolist(), rewards.tolist(), strict=True):
            self._samples[prompt] += 1
            self._rewards[prompt] = self._rewards.get(prompt, 0.0) + reward

    def add_all(self, other: SourceFigures) -> None:
        """What another one holds."""
        self._samples += other._samples
        for prompt, reward in other._rewards.items():
            self._rewards[prompt] = self._rewards.get(prompt, 0.0) + reward

    def metrics(self, prompts: Prompts) -> dict[str, float]:
        """Samples and mean reward of each source that has some; nothing where there is but one source."""
        sources = prompts.sources()
        if len(sources) < 2:
            return {}
        ends, samples, rewards = [end for _, end in sources], Counter[str](), dict[str, float]()
        for prompt, count in self._samples.items():
            label = sources[bisect.bisect_right(ends, prompt)][0]
            samples[label] += count
            rewards[label] = rewards.get(label, 0.0) + self._rewards[prompt]
        found: dict[str, float] = {}
        for label, count in samples.items():
            found[names.of_source(label, "samples")] = count
            found[names.of_source(label, "reward_mean")] = rewards[label] / count
        return found
