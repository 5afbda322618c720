"""ReMax: each response against the greedy one to its prompt (arXiv:2310.10505)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.advantages.group_relative import remax_advantages
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.settings import ClippedSettings


class ReMaxSettings(ClippedSettings):
    """Settings of ReMax: those that all algorithms share."""

    greedy_baseline: ClassVar[bool] = True

    name: str = "remax"


def make_experience(step: Step[ReMaxSettings]) -> Experience:
    """No critic; the baseline of a response is the reward of the most likely one."""
    draw = step.draw()
    batch = step.logprobs(step.generate(draw))
    greedy = step.rewards(step.generate_greedy(draw), baseline=True)
    baselines = dict(zip(greedy.per_sample["group_ids"].tolist(), greedy.per_sample["rewards"].tolist(), strict=True))
    return with_advantages(step, Experience(step.rewards(batch), baselines=baselines))


def with_advantages(step: Step[ReMaxSettings], experience: Experience) -> Experience:
    """The samples of a prompt whose greedy response has no reward are left out."""
    batch, baselines = experience.batch, experience.baselines
    groups = batch.per_sample["group_ids"].tolist()
    batch = batch.select([row for row, group in enumerate(groups) if group in baselines])
    of_samples = torch.tensor([baselines[group] for group in batch.per_sample["group_ids"].tolist()])
    rewards = batch.per_sample["rewards"] - step.sequence_kl(batch)
    return replace(experience, batch=batch.with_per_sample(advantages=remax_advantages(rewards, of_samples)))


def learn(step: Step[ReMaxSettings], experience: Experience) -> None:
    """Update the actor."""
    step.update(experience)


ALGORITHM = Algorithm(ReMaxSettings, make_experience, with_advantages, learn)
