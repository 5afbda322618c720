"""The environment of tools: a turn with calls is answered by them, and one without is the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from engine3d.rollout.tool_calls import ToolCall
from hybridflow.environments.call_server import NonsenseError
from hybridflow.environments.environment import Observation, Task, Turn
from hybridflow.environments.tools.functions import ArgumentsError, Tool, ToolFailureError, in_thread
from hybridflow.rewards.compute_score import SOURCE
from hybridflow.rewards.processes.function_process import RewardError, ScoringFunction

_MALFORMED = "error: the call cannot be read"


class ToolEnvironment:
    """One episode with tools. What a model does wrong is answered; any other failure drops the episode.

    Args:
        tools: by name.
        reward: of the answer.
        on_exception: "answer" a call whose tool raises, or "drop" the episode.
        timeout_s: limit of the reward, in seconds.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        reward: ScoringFunction,
        on_exception: Literal["answer", "drop"],
        timeout_s: float,
    ) -> None:
        self._tools, self._reward, self._on_exception = tools, reward, on_exception
        self._timeout_s = timeout_s

    async def reset(self, task: Task) -> Observation:
        """Begin the episode."""
        self._task = task
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """Answer the calls of a turn, or score it."""
        if turn.calls:
            counts: dict[str, float] = {}
            answers = await asyncio.gather(*(self._answer(call, counts) for call in turn.calls))
            return Observation(answers=answers, counts=counts)
        if turn.malformed:
            return Observation(answers=(_MALFORMED,), counts={"calls_malformed": 1})
        return Observation(reward=await self._score(turn.text), done=True)

    async def close(self) -> None:
        """End the episode."""

    async def _answer(self, call: ToolCall, counts: dict[str, float]) -> str:
        def count(name: str) -> None:
            counts[name] = counts.get(name, 0) + 1

        tool = self._tools.get(call.name)
        if tool is None:
            count("calls_unknown")
            return f"error: there is no tool {call.name[:60]!r}, expected one of {', '.join(self._tools)}"
        count(f"calls_{tool.name}")
        try:
            arguments = tool.arguments(call.arguments)
        except ArgumentsError as error:
            count("calls_with_wrong_arguments")
            return f"error: {error}"
        try:
            return await tool(arguments)
        except (NonsenseError, ToolFailureError):
            raise
        except Exception as error:
            if not isinstance(error, ValueError) and self._on_exception == "drop":
                raise
            count("calls_refused")
            return f"error: {type(error).__name__}: {' '.join(str(error).split())[:500]}"

    async def _score(self, text: str) -> float:
        value: float | str = await in_thread(self._value, text)  # other episodes go on meanwhile
        if isinstance(value, str):
            raise ToolFailureError(f"the reward {value}")
        return value

    def _value(self, text: str) -> float | str:
        """The reward of a text, or why it has none. Waits for the texts of other episodes."""
        task, function = self._task, self._reward
        try:
            function.know(task.fields)
        except RewardError as error:
            raise ToolFailureError(f"the reward {error}") from None
        if SOURCE in function.columns:
            raise ToolFailureError("the reward asks for data_source, expected a column of this name in the data")
        # What other rows have and this one lacks is null.
        known: dict[str, Any] = {**task.fields, "prompts": task.prompt, "answers": task.answer}
        columns = {name: [known.get(name)] for name in function.columns}
        value = function.score([text], columns, self._timeout_s)[0]
        return value if isinstance(value, str) else float(value)
