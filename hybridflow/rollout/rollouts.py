"""Rollouts of a step, and responses to any other prompts, as a source gives them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine3d.rollout.config import Sampling
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.data.prompts import Draw
from hybridflow.rewards.result import RewardResult
from hybridflow.rollout.buffered_groups import BufferedGroups


@dataclass(frozen=True)
class Rollout:
    """Responses to a draw.

    Args:
        batch: the samples.
        seconds: time in which the step waited for them; None where others waited, or nobody.
    """

    batch: RemoteBatch
    seconds: float | None


@dataclass(frozen=True)
class RolloutSnapshot:
    """State of a source between two steps.

    Args:
        order: `PromptSampler.state_dict()` of the training prompts.
        samples_drawn: sample ids that were given out.
        groups: groups that were drawn and not trained on; None without any.
    """

    order: dict[str, Any]
    samples_drawn: int
    groups: BufferedGroups | None = None


def drawn_event(draw: Draw) -> dict[str, Any]:
    """Event of prompts that were drawn for one call of all engines."""
    return {"event": "drawn", "groups": list(draw.groups), "prompts": list(draw.indices)}


class Responses:
    """Responses to any prompts, complete or not.

    Args:
        wait: waits for them. Returns the samples, and the rewards of episodes.
    """

    def __init__(self, wait: Callable[[], tuple[RemoteBatch, RewardResult | None]]) -> None:
        self._wait = wait
        self.rewards: RewardResult | None = None
        """Rewards of episodes, once `batch` has returned; None of other responses."""

    def batch(self) -> RemoteBatch:
        """Wait for all engines. The samples, whose tokens stay where they are. Raises what failed."""
        batch, self.rewards = self._wait()
        return batch


class Samples(Protocol):
    """Responses to any prompts: evaluations, greedy baselines."""

    @abstractmethod
    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Responses:
        """Ask all engines for `samples_per_prompt` responses to each prompt, those to one prompt side by side.

        Args:
            draw: the prompts.
            sampling: distribution that tokens are drawn from.
            samples_per_prompt: responses to each.
            first_sample: id of the first response, if `reserve_samples` gave it out before.
        """

    @abstractmethod
    def reserve_samples(self, count: int) -> int:
        """Give out `count` sample ids. Returns the first of them."""
