"""The interface of an environment, which has an object for each episode.

    class Guess:
        async def reset(self, task: Task) -> Observation:
            self._secret = int(task.answer)
            return Observation()

        async def step(self, turn: Turn) -> Observation:
            right = turn.text.strip() == str(self._secret)
            return Observation("right" if right else "wrong", reward=float(right), done=right)

        async def close(self) -> None: ...

Its module is imported in processes of its own. Many environments share a
process: one that computes for long without `await` keeps the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine3d.rollout.tool_calls import ToolCall


@dataclass(frozen=True)
class Task:
    """The task of an episode.

    Args:
        prompt, answer: of its example in the data.
        fields: further fields of the example, by name.
        seed: the same in all episodes of a group, and another in each group.
    """

    prompt: str
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """A turn of the policy.

    Args:
        text: without special tokens.
        complete: True if it ended by itself, False if it had no tokens left.
        calls: of tools, where there are any (`environment.tools`).
        malformed: True if it has a call that cannot be read.
    """

    text: str
    complete: bool = True
    calls: Sequence[ToolCall] = ()
    malformed: bool = False


@dataclass(frozen=True)
class Observation:
    """Answer of an environment.

    Args:
        text: that the policy reads next; none if empty.
        answers: of tools to the calls of the turn, in their order, in place of a text.
        reward: of the turn.
        done: True if the episode is over.
        counts: of events in this turn, by name: their sum over episodes is logged.
    """

    text: str = ""
    answers: Sequence[str] = ()
    reward: float = 0.0
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """An environment of one episode, made with the `arguments` of its settings.

    An exception of any method is a failure of the environment: the episode is dropped, and counted. A class with
    `replayable = True` gives the same answers to the same turns, and may be played twice: where another environment
    ends its process, its episode is played again elsewhere, with the turns that were drawn.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the episode. The observation's text follows the prompt; its reward and end do not count.

        The text must be empty where observations are messages (`environment.role`), since the prompt ends with the
        header of the policy's.
        """

    async def step(self, turn: Turn) -> Observation:
        """Answer a turn."""

    async def close(self) -> None:
        """End the episode, complete or not. Not called if the process is killed; a few seconds long as the run ends."""
