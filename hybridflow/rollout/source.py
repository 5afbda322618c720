"""The interface by which a run gets its samples, however engines are asked for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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


class RolloutSource(ABC, Samples):
    """Samples of a run: the groups of its steps, and responses to any other prompts.

    Trainer, steps, evaluations and checkpoints know nothing else of how samples are made.
    """

    drains: bool
    """True if requests in flight have to end before engines get other weights."""
    scored_as_they_end: bool
    """True if buffered groups hold scores, which other settings of rewards make useless."""

    @abstractmethod
    def open(self, version: int, *, steps_left: int) -> None:
        """Begin, once: engines serve the weights of `version`. Nothing is generated ahead after `steps_left` steps."""

    @abstractmethod
    def close(self) -> None:
        """End what the source has started."""

    # Groups of a step

    @abstractmethod
    def draw(self, count: int | None = None) -> Draw:
        """The prompts of the step, or `count` further ones.

        Raises:
            UserError: the source has no other prompts than those of the step.
            EngineError: an engine failed.
        """

    @abstractmethod
    def rollout(self, draw: Draw, step: int) -> Rollout:
        """The responses to what `draw` returned. Raises UserError for other prompts."""

    @abstractmethod
    def rewards(self, what: str, sample_ids: Sequence[int]) -> RewardResult | None:
        """Scores that samples of the last step have already; None if some have none.

        Args:
            what: "reward" or "cost".
            sample_ids: of these samples.

        Raises:
            UserError: a function failed on all of them, or every sample is dropped.
        """

    @abstractmethod
    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by name."""

    @abstractmethod
    def take_events(self) -> tuple[dict[str, Any], ...]:
        """Events since the last call: each with its kind as "event"."""

    @abstractmethod
    def trained(self, version: int, rates: Mapping[int, float]) -> None:
        """End the step: engines serve `version`. `rates`: pass rates of its prompts, for a curriculum."""

    # Weights

    @abstractmethod
    def drain(self) -> None:
        """Wait for requests in flight. Raises what failed."""

    @abstractmethod
    def notice_lost(self) -> None:
        """Restart lost engines, where the recipe allows it."""

    @abstractmethod
    def change(self, engines: Sequence[int]) -> None:
        """Send nothing more to these engines, whose weights are about to change."""

    @abstractmethod
    def serve(self, engines: Sequence[int], version: int) -> None:
        """Send requests to these engines again, which serve `version`."""

    @abstractmethod
    def restart_engine(self, engine: int, cause: str) -> None:
        """Restart a lost engine. Raises EngineError where the recipe does not allow it."""

    # Checkpoints

    @abstractmethod
    def begin_step(self) -> None:
        """Remember the state that `abandon` returns to."""

    @abstractmethod
    def abandon(self) -> None:
        """Return to the state before the step, which will not train."""

    @abstractmethod
    def snapshot(self) -> RolloutSnapshot:
        """The state between two steps."""

    @abstractmethod
    def restore(self, snapshot: RolloutSnapshot) -> None:
        """Continue from a snapshot, before `open`."""

    @abstractmethod
    def unusable(self, groups: BufferedGroups) -> str | None:
        """Reason for which buffered groups cannot be trained on with this recipe; None if they can."""
