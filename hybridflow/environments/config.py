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
TOOLS_REWARD = "environment.tools"
"""Name of the reward function of `tools` in checks."""
AGENT_COMMAND = "hybridflow.environments.agents.command:play"
"""Function of an agent that is a command."""


OF_EPISODES = frozenset(
    {
        *("path", "agent", "arguments", "tools", "tool_parser", "ignored_options"),
        *("role", "max_turns", "max_turn_tokens", "max_answer_characters"),
    }
)
"""Settings that decide the tokens and rewards of an episode."""


class EnvironmentConfig(Settings):
    """Settings of the environment, and of episodes in it."""

    path: str | None = None
    """A class with the methods of `hybridflow.environments.environment.Environment`, as "package.module:Class" or
    "some/file.py:Class". Modules and relative files are searched for from the working directory. Null with `tools` and
    `agent`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, or of the function of an agent, by name, the same in every episode."""
    tools: ToolsConfig | None = None
    """Tools that the policy calls before it answers, in place of a class."""
    agent: str | tuple[str, ...] | None = None
    """An agent in place of a class, which plays through an endpoint of the run: a function as "package.module:function"
    or "some/file.py:function", or a command as a list, such as [python, agent.py]."""
    tool_parser: str | None = None
    """SGLang's parser of calls of an agent's tools, by name, such as qwen25; that of the chat template's family
    if null."""
    ignored_options: tuple[str, ...] = ()
    """Options of an agent's requests that have no effect, such as temperature. Others that would change how tokens are
    drawn are refused."""
    role: ObservationRole | None = None
    """Role of the message that an observation is in the chat template. Its text follows the policy's as it is if null.
    Answers of `tools` are messages of the role tool.
    """
    max_turns: int = Field(default=8, ge=1, le=1 << 16)
    """Most turns of the policy, after which an episode ends with the rewards that it has. Further requests of an agent
    are refused."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens of a turn of the policy. Those of a complete episode, observations included, are
    `rollout.sampling.max_new_tokens`, which alone limits them if null."""
    credit: Literal["episode", "turn"] = "episode"
    """Return that the tokens of a turn are credited with: "episode" is the sum of all rewards of the episode, "turn" is
    that of the turn's reward and of those after it."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Factor of a reward in the return of the turn before the one that it follows, once for each turn that it is away.
    Only with credit "turn"."""
    tool_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Limit of an answer of the environment, and of an agent's time between two requests, in seconds, after which the
    episode is dropped."""
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

    @field_validator("path", "agent")
    @classmethod
    def _check_path(cls, path: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if not isinstance(path, str):
            return path
        module, _, name = path.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"is {path!r}, expected package.module:Class or some/file.py:Class, or such a function")
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
        kinds = [name for name in ("path", "tools", "agent") if getattr(self, name) is not None]
        if len(kinds) != 1:
            what = f"{' and '.join(kinds)} are set together" if kinds else "neither path nor tools nor agent is set"
            raise ValueError(f"{what}, expected one of them")
        of_agents = [name for name in ("ignored_options", "tool_parser") if getattr(self, name)]
        if of_agents and self.agent is None:
            raise ValueError(f"{of_agents[0]} is set without agent, whose requests it is for; expected none")
        if self.agent is not None:
            self._check_agent()
        if self.turn_discount != 1.0 and self.credit == "episode":
            raise ValueError(
                f"turn_discount={self.turn_discount} with credit='episode', which does not use it; expected "
                "credit='turn', or no discount"
            )
        if self.tools is None:
            return self
        if given := [name for name in ("role", "arguments") if getattr(self, name)]:
            raise ValueError(f"{given[0]} is set with tools, which have none; expected none")
        if (most := self.tools.most_processes()) >= self.limits.processes:
            raise ValueError(
                f"limits.processes={self.limits.processes} of a worker whose sandboxes have up to {most} (at_a_time "
                f"and limits.processes of arguments.sandbox), expected more"
            )
        if (longest_s := self.tools.programs_s()) >= self.tool_timeout_s:
            raise ValueError(
                f"tool_timeout_s={self.tool_timeout_s:g} with programs that may take {longest_s:g} s (limits.timeout_s "
                "of arguments.sandbox, and sample_timeout_s of the reward code), expected more: the episode of an "
                "endless program would be dropped"
            )
        return self

    def _check_agent(self) -> None:
        if self.role is not None:
            raise ValueError(
                f"role={self.role} is set with agent, whose messages have roles of their own; expected null"
            )
        if isinstance(self.agent, tuple) and (self.arguments or not self.agent):
            given = "arguments is set with" if self.agent else "is without"
            raise ValueError(f"{given} the words of a command, expected all of them in agent")

    @property
    def class_path(self) -> str:
        """The class of the environment, or the function of the agent, with its file absolute."""
        if self.agent is not None:
            return AGENT_COMMAND if isinstance(self.agent, tuple) else function_path(self.agent)
        return TOOL_ENVIRONMENT if self.path is None else function_path(self.path)

    @property
    def class_arguments(self) -> dict[str, Any]:
        """Arguments of the class or function."""
        if isinstance(self.agent, tuple):
            return {"command": list(self.agent)}
        return self.arguments if self.tools is None else self.tools.class_arguments

    @property
    def server(self) -> str:
        """The function that serves its calls in its process."""
        if self.agent is not None:
            return "hybridflow.environments.agents.process:serve"
        return f"hybridflow.environments.{'environment_process' if self.tools is None else 'tools.process'}:serve"

    @property
    def title(self) -> str:
        """The environment in errors."""
        if self.agent is not None:
            return f"environment.agent ({self.agent if isinstance(self.agent, str) else ' '.join(self.agent)})"
        return "environment.tools" if self.path is None else f"environment ({self.path})"

    @property
    def reward(self) -> RewardConfig:
        """The reward of episodes as that of a function, for what handles rewards by name. Failures drop a sample."""
        function = RewardFunctionConfig.model_construct(name=ENVIRONMENT, path=ENVIRONMENT, on_failure="drop")
        return RewardConfig(functions=(function,))

    @property
    def tools_reward(self) -> RewardConfig | None:
        """The reward function of `tools`, for checks of what it needs; None without tools. Failures drop an episode."""
        if self.tools is None:
            return None
        function = RewardFunctionConfig.model_construct(
            name=TOOLS_REWARD,
            path=function_path(self.tools.reward.path),
            arguments=self.tools.reward.arguments,
            special_tokens="keep",  # a text is that of a turn, whatever it has
            timeout_s=self.tool_timeout_s,
            load_timeout_s=self.load_timeout_s,
            on_failure="drop",
            environment=self.environment,
            limits=self.limits,
        )
        return RewardConfig(functions=(function,))
