"""Messages between a rollout controller, which has an episode's tokens, and the ranks that have its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.environments.environment import Task


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """Begin an episode.

    Args:
        sample: its id.
        task: of it.
        most_tokens: of the episode, its prompt included.
    """

    sample: int
    task: Task
    most_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """A turn of the policy, to be answered.

    Args:
        sample: id of the episode.
        tokens: of the turn.
        complete: True if it ended by itself, False if it had no tokens left.
    """

    sample: int
    tokens: Sequence[int]
    complete: bool


@dataclass(frozen=True, slots=True)
class EpisodeClose:
    """The end of an episode, whose environment is not needed any more."""

    sample: int


EpisodeMessage = EpisodeStart | EpisodeTurn | EpisodeClose


@dataclass(frozen=True, slots=True)
class EpisodeAnswer:
    """Answer of an environment to the start or a turn of an episode.

    Args:
        sample: id of the episode.
        tokens: that follow in the episode.
        reward: of the turn.
        done: True if the episode is over.
        sequence: number of the sequence of an agent's episode that the tokens belong to; the next unused number begins
            another. None of an environment, whose episode is one sequence behind the prompt of the data.
        limit: most tokens of the turn, of an agent's.
        truncated: True if the episode is over since it had no turns or tokens left, of an agent's.
        counts: of events of the turn, by name.
        seconds: that it took.
        failure: kind of the failure of an environment that gave no answer; None otherwise.
        reason: of it, one line to follow the name of the environment.
    """

    sample: int
    tokens: Sequence[int] = ()
    reward: float = 0.0
    done: bool = False
    sequence: int | None = None
    limit: int = 0
    truncated: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None
    reason: str = ""


class EpisodeRank(Protocol):
    """Environments as a controller sees them. Each call raises the error of their rank."""

    async def send(self, messages: Sequence[EpisodeMessage]) -> None:
        """Begin what these ask for."""

    async def answers(self) -> Sequence[EpisodeAnswer]:
        """Answers since the last call; waits until there is one, but not for ever: it may be none."""
