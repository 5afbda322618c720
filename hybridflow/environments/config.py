"""Settings of episodes."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from engine3d.settings import LONGEST_S, MOST_TOKENS, Settings
from hybridflow.environments.tools.config import ToolsConfig
from hybridflow.rewards.config import (
    ENVIRONMENT,
    FILES_OF_FUNCTIONS,
    MOST_WORKERS,
    RewardConfig,
    RewardFunctionConfig,
    RewardLimits,
    function_path,
)

ObservationRole = Literal["user", "tool"]

TOOL_ENVIRONMENT = "hybridflow.environments.tools.tool_environment:ToolEnvironment"
"""Class of the environment of `tools`."""


class EnvironmentConfig(Settings):
    """Settings of the environment, and of episodes in it."""

    path: str | None = None
    """A class with the methods of `hybridflow.environments.environment.Environment`, as "package.module:Class" or
    "some/file.py:Class". Modules and relative files are searched for from the working directory. Null with `tools`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, by name, the same in every episode."""
    tools: ToolsConfig | None = None
    """Tools that the policy calls before it answers, in place of a class."""
    role: ObservationRole | None = None
    """Role of the message that an observation is in the chat template. Its text follows the policy's as it is if null.
    Answers of `tools` are messages of the role tool.
    """
    max_turns: int = Field(default=8, ge=1, le=1 << 16)
    """Most turns of the policy, after which an episode ends with the rewards that it has."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens of a turn of the policy. Those of a complete episode, observations included, are
    `rollout.sampling.max_new_tokens`, which alone limits them if null."""
    tool_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Limit of an answer of the environment, in seconds, after which its episode is dropped."""
    max_answer_characters: int = Field(default=1 << 16, ge=0, le=1 << 24)
    """Most characters of an observation. The episode is dropped that has one with more."""
    workers: int = Field(default=2, ge=1, le=MOST_WORKERS)
    """Processes with environments on each rank of `placement.reward`, each of which has a share of the episodes."""
    load_timeout_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Limit of the import of the module, in seconds."""
    environment: tuple[str, ...] = ()
    """Names of the environment variables that the class sees in addition to those of every program."""
    limits: RewardLimits = RewardLimits()
    """Limits of the processes."""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is None:
            return None
        module, _, name = path.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"is {path!r}, expected package.module:Class or some/file.py:Class")
        if not module.endswith(FILES_OF_FUNCTIONS[0]) and not all(map(str.isidentifier, module.split("."))):
            raise ValueError(
                f"is {path!r}, expected the name of a module or a file that ends with .py before the colon"
            )
        return path

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}, expected what JSON has") from None
        return arguments

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if (self.path is None) == (self.tools is None):
            both = "neither path nor tools is" if self.path is None else "path and tools are both"
            raise ValueError(f"{both} set, expected one of both")
        if self.tools is None:
            return self
        if given := [name for name in ("role", "arguments") if getattr(self, name)]:
            raise ValueError(f"{given[0]} is set with tools, which have none; expected none")
        if (most := self.tools.most_processes()) >= self.limits.processes:
            raise ValueError(
                f"limits.processes={self.limits.processes} of a worker whose sandboxes have up to {most} (at_a_time "
                f"and limits.processes of arguments.sandbox), expected more"
            )
        return self

    @property
    def class_path(self) -> str:
        """The class of the environment, with its file absolute."""
        return TOOL_ENVIRONMENT if self.path is None else function_path(self.path)

    @property
    def class_arguments(self) -> dict[str, Any]:
        """Arguments of the class."""
        return self.arguments if self.tools is None else self.tools.class_arguments

    @property
    def title(self) -> str:
        """The environment in errors."""
        return "environment.tools" if self.path is None else f"environment ({self.path})"

    @property
    def reward(self) -> RewardConfig:
        """The reward of episodes as that of a function, for what handles rewards by name. Failures drop a sample."""
        function = RewardFunctionConfig.model_construct(name=ENVIRONMENT, path=ENVIRONMENT, on_failure="drop")
        return RewardConfig(functions=(function,))
