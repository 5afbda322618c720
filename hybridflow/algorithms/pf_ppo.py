"""PF-PPO: PPO on the responses with reliable rewards, some of them twice (arXiv:2409.06957).

A step is:

1. Filtration. Of the responses to each prompt those that `filtration` names by the rank of their rewards stay; each
   other one is dropped with probability `filter_prob`.
2. Replay. From the buffer, which has samples of earlier steps, replay_ratio * (number that stayed) samples, rounded
   down, are drawn: uniformly, without replacement, all if there are fewer. They are removed from the buffer.
3. Those of this step that `filtration` names, not those that stayed by chance, enter the buffer. Samples more than
   replay_max_age versions old are removed, and those over capacity, the oldest first.

So a step trains on a sample at most twice: in the step that drew it and, if it is drawn from the buffer, in one later.
The rewards stay those of the step that drew it. Values, advantages and log-probs of the reference are of the step that
trains on it. Its ratio is to the log-probs of the policy that drew it, which are the engines', and so are those of
the step's new samples where old ones are among them. All choices follow from the run's seed and the number of the step.

The paper has the filtration (filter_prob 1) and no replay (replay_buffer_size 0).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from engine3d.errors import EngineError
from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms import ppo
from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.filtration import Filtration, filtered_by_rank
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.metrics import names as metrics


class PFPPOSettings(ppo.PPOSettings):
    """Settings of PF-PPO: PPO's, and those of the filtration and the replay."""

    group_baseline: ClassVar[bool] = True
    unscheduled: ClassVar[frozenset[str]] = ppo.PPOSettings.unscheduled | {"filter_prob"}  # by it goes `least_kept`

    name: str = "pf_ppo"
    filtration: Filtration = "best-random"
    """Responses to a prompt that are trained on: the filtration_n of the highest rewards; the best and a random
    other; or the best and the worst."""
    filtration_n: int = Field(default=1, ge=1)
    """Responses that "best-n" keeps."""
    filter_prob: float = Field(default=0.8, ge=0, le=1)
    """Probability that each of the other responses is dropped: 1 drops all of them, 0 none."""
    replay_buffer_size: int = Field(default=10_000, ge=0)
    """Most samples of the replay buffer, in host memory of the driver; 0 for no buffer."""
    replay_ratio: float = Field(default=0.5, gt=0, le=1)
    """Samples from the buffer for each new one of a step."""
    replay_max_age: int | None = Field(default=10, ge=1)
    """Most versions between the weights that drew a sample of the buffer and those that generate; any if null."""

    def least_kept(self, samples_per_prompt: int) -> int:
        if self.filter_prob == 0:
            return samples_per_prompt
        return min(self.filtration_n if self.filtration == "best-n" else 2, samples_per_prompt)

    def most_trained(self, samples: int) -> int:
        return samples + min(int(self.replay_ratio * samples), self.replay_buffer_size)

    @property
    def kept_samples(self) -> int:
        return self.replay_buffer_size

    @property
    def _unused(self) -> dict[str, str]:
        unused = dict(super()._unused)
        if self.filtration != "best-n":
            unused["filtration_n"] = f"filtration {self.filtration!r}, which does not use it; expected 'best-n'"
        if not self.replay_buffer_size:
            why = "replay_buffer_size 0, which does not use it; expected a size"
            unused |= dict.fromkeys(("replay_ratio", "replay_max_age"), why)
        return unused


def make_experience(step: Step[PFPPOSettings]) -> Experience:
    """Make PPO's experience from filtered samples and older ones."""
    batch = step.rewards(step.generate(step.draw()))
    batch = step.critic_values(step.logprobs(_with_replayed(step, batch)))
    return ppo.with_advantages(step, Experience(batch))


def _with_replayed(step: Step[PFPPOSettings], batch: RemoteBatch) -> RemoteBatch:
    """Join the step's samples that the filter keeps with samples of the buffer, and add the new ones to the buffer."""
    config, chance = step.config, step.generator("filtration")
    rewards, groups = batch.per_sample["rewards"], batch.per_sample["group_ids"]
    named = filtered_by_rank(rewards, groups, config.filtration, chance, best=config.filtration_n)
    stays = named | (torch.rand(len(batch), generator=chance, dtype=torch.float64) >= config.filter_prob)
    fresh = batch.select(stays.nonzero()[:, 0])
    step.log({metrics.SAMPLING_KEPT: stays.double()})
    if len(fresh) < step.least_samples:
        raise EngineError(
            f"step {step.number}: {len(fresh)} of {len(batch)} samples are left by algorithm.filtration="
            f"{config.filtration}, expected at least {step.least_samples}"
        )
    if not config.replay_buffer_size:
        return fresh
    replay, version = step.replay, int(batch.per_sample["policy_versions"].max())
    replay.drop_older(version)
    old = replay.take(int(config.replay_ratio * len(fresh)), step.generator("replay"))
    replay.add(batch.select(named.nonzero()[:, 0]).fetch())
    replayed = len(old) if old is not None else 0
    step.values[metrics.REPLAY_SIZE] = len(replay)
    step.values[metrics.REPLAY_SHARE] = replayed / (replayed + len(fresh))
    if old is None:
        return fresh
    step.values[metrics.REPLAY_AGE] = float((version - old.policy_versions).double().mean())
    joined = RemoteBatch.concatenate([fresh, step.recall(old)])
    # Old and new are in every mini-batch.
    return joined.select(torch.randperm(len(joined), generator=step.generator("order")))


ALGORITHM = Algorithm(PFPPOSettings, make_experience, ppo.with_advantages, ppo.learn)
