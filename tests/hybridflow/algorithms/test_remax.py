"""ReMax: the greedy response to each prompt, and the samples whose prompt has none."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hybridflow.algorithms import remax
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.remax import ReMaxSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.data.prompts import Draw
from tests.support.steps import NumberedStep

GREEDY = 90
"""The number of a greedy response among the samples of its group."""


@dataclass
class GreedyStep(NumberedStep):
    """Step whose greedy responses have other numbers and another order than the samples."""

    baselines: list[bool] = field(default_factory=list)

    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        made, self.samples = self.samples, 1
        result = self.generate(draw)
        self.samples = made
        return result.with_per_sample(sample_ids=result.per_sample["sample_ids"] + GREEDY).select([2, 0, 3, 1])

    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, partial: bool = False) -> RemoteBatch:
        self.baselines.append(baseline)
        return super().rewards(batch, baseline=baseline, partial=True)


def reward(group: int, sample: int) -> float | None:
    if sample == GREEDY:
        return None if group == 1 else group / 8
    return None if (group, sample) == (2, 0) else float(sample)


def test_each_sample_is_held_against_the_greedy_response_to_its_own_prompt() -> None:
    step = GreedyStep(ReMaxSettings(), reward, samples=2)
    experience = remax.make_experience(step)
    per_sample = experience.batch.per_sample
    # Of group 1 the greedy response has no reward, so nothing is learned from it; of group 2 one sample has none.
    assert per_sample["group_ids"].tolist() == [0, 0, 2, 3, 3]
    assert per_sample["advantages"].tolist() == pytest.approx([0.0, 1.0, 0.75, -0.375, 0.625])
    assert experience.baselines == {0: 0.0, 2: 0.25, 3: 0.375}
    assert step.baselines == [True, False]  # the greedy ones are no figures of the policy


def test_other_rewards_are_held_against_the_same_responses() -> None:
    step = GreedyStep(ReMaxSettings(), reward, samples=2)
    first = remax.make_experience(step)
    rewards = first.batch.per_sample["rewards"] + 1
    again = remax.with_advantages(
        step, Experience(first.batch.with_per_sample(rewards=rewards), baselines=first.baselines)
    )
    assert again.batch.per_sample["advantages"].tolist() == pytest.approx(
        (first.batch.per_sample["advantages"] + 1).tolist()
    )


def test_one_response_to_each_prompt_is_enough() -> None:
    step = GreedyStep(ReMaxSettings(), lambda group, sample: 0.5 * (sample != GREEDY), samples=1)
    assert remax.make_experience(step).batch.per_sample["advantages"].tolist() == [0.5] * 4
