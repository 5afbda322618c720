"""Rewards by source."""

from __future__ import annotations

import torch

from hybridflow.data.prompts import Prompts
from hybridflow.trainer.source_figures import SourceFigures


class Mixed(Prompts):
    """Prompts 0 to 2 of one source, 3 and 4 of another; a third has none in the step."""

    def sources(self) -> tuple[tuple[str, int], ...]:
        return ("easy", 3), ("hard", 5), ("other", 9)


def test_each_source_has_its_samples_and_its_mean_reward() -> None:
    figures = SourceFigures()
    figures.add(torch.tensor([0, 0, 2, 3]), torch.tensor([1.0, 0.0, 0.5, 0.25]))
    figures.add(torch.tensor([4]), torch.tensor([0.75]))
    assert figures.metrics(Mixed([], [])) == {
        "data/easy/samples": 3,
        "data/easy/reward_mean": 0.5,
        "data/hard/samples": 2,
        "data/hard/reward_mean": 0.5,
    }
    assert figures.metrics(Prompts([], [])) == {}
