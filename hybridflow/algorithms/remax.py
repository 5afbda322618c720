"""ReMax: each response against the greedy one to its prompt (arXiv:2310.10505)."""

from __future__ import annotations

import torch

from hybridflow.algorithms.advantages.group_relative import remax_advantages
from hybridflow.trainer.step import Step


def remax(step: Step) -> None:
    """One step: no critic; the baseline of a response is the reward of the most likely one.

    The samples of a prompt whose greedy response has no reward are left out.
    """
    draw = step.draw()
    batch = step.logprobs(step.generate(draw))
    greedy = step.rewards(step.generate_greedy(draw), baseline=True)
    batch = step.rewards(batch)
    baseline = dict(zip(greedy.facts["group_ids"].tolist(), greedy.facts["rewards"].tolist(), strict=True))
    groups = batch.facts["group_ids"].tolist()
    batch = batch.select([row for row, group in enumerate(groups) if group in baseline])
    baselines = torch.tensor([baseline[group] for group in batch.facts["group_ids"].tolist()])
    rewards = batch.facts["rewards"] - step.sequence_kl(batch)
    step.update(batch.with_facts(advantages=remax_advantages(rewards, baselines)))
