"""GRPO: each response against the others to its prompt (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from hybridflow.algorithms.advantages.group_relative import group_relative_advantages
from hybridflow.trainer.step import Step


def grpo(step: Step) -> None:
    """One step: no critic; the baseline of a response is the mean reward of its group."""
    batch = step.generate(step.draw())
    batch = step.logprobs(batch)
    batch = step.rewards(batch)
    rewards = batch.facts["rewards"] - step.sequence_kl(batch)
    advantages = group_relative_advantages(
        rewards, batch.facts["group_ids"], normalise_by_std=step.config.normalise_advantages_by_std
    )
    step.update(batch.with_facts(advantages=advantages))
