"""Settings of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from engine3d.settings import Settings
from hybridflow.rewards.builtin import BUILTIN_REWARDS, CODE_TIMEOUT_S, PROVIDED_REWARDS, REMOTE_REWARDS
from hybridflow.rewards.config import function_path

if TYPE_CHECKING:
    from hybridflow.sandbox.config import SandboxSettings

PROVIDED_TOOLS: Mapping[str, str] = {
    "python": "hybridflow.environments.tools.python_tool:PythonTool",
    "search": "hybridflow.environments.tools.search_tool:SearchTool",
}
"""Tools of the project, by name."""


class FunctionConfig(Settings):
    """A function, or a class that is made with arguments and whose instance is called."""

    path: str
    """A name of this project, "package.module:function" or "some/file.py:function"."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class or function, by name, which the model does not see."""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}, expected what JSON has") from None
        return arguments

    def imported_from(self, provided: Mapping[str, str]) -> str:
        """Path to import, with its file absolute. `provided`: functions of this project by name."""
        return provided.get(self.path) or function_path(self.path)


def _with_path(given: Any) -> Any:
    return {"path": given} if isinstance(given, str) else given


def _each_with_path(given: Any) -> Any:
    return [_with_path(entry) for entry in given] if isinstance(given, list | tuple) else given


def _check_path(path: str, provided: Mapping[str, str]) -> None:
    module, _, name = path.rpartition(":")
    if path in provided or (module and name.isidentifier()):
        return
    raise ValueError(
        f"is {path!r}, expected one of {', '.join(provided)}, package.module:function or some/file.py:function"
    )


class ToolsConfig(Settings):
    """Settings of the environment of tools. It has `environment.tool_timeout_s` for all calls of a turn."""

    functions: Annotated[tuple[FunctionConfig, ...], BeforeValidator(_each_with_path)] = Field(min_length=1)
    """Tools, each a path, or a path with arguments: "python" (programs in the sandbox), "search" (documents),
    "package.module:function" or "some/file.py:function". The model knows them by their signatures and docstrings."""
    reward: Annotated[FunctionConfig, BeforeValidator(_with_path)]
    """Reward function of the answer, which is the turn without a call: its path as of `reward.functions.path`, with its
    arguments."""
    parser: str | None = None
    """Name of SGLang's parser of calls, such as qwen25, hermes or pythonic. That of the chat template's family if
    null."""
    on_exception: Literal["drop", "answer"] = "drop"
    """Treatment of an exception of a tool other than ValueError: "drop" the episode, or "answer" the call with it. A
    ValueError says that the model's arguments are wrong, and is always the answer."""

    @field_validator("functions")
    @classmethod
    def _check_functions(cls, functions: tuple[FunctionConfig, ...]) -> tuple[FunctionConfig, ...]:
        for function in functions:
            _check_path(function.path, PROVIDED_TOOLS)
        return functions

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, reward: FunctionConfig) -> FunctionConfig:
        if reward.path in REMOTE_REWARDS:
            raise ValueError(f"is {reward.path!r}, which was not tried with tools; expected a function of this machine")
        _check_path(reward.path, _REWARDS)
        return reward

    @property
    def class_arguments(self) -> dict[str, Any]:
        """Arguments of the class `ToolEnvironment`, as its process reads them."""
        return {
            "functions": [
                {"path": function.imported_from(PROVIDED_TOOLS), "arguments": function.arguments}
                for function in self.functions
            ],
            "reward": {"path": self.reward.imported_from(_REWARDS), "arguments": self.reward.arguments},
            "on_exception": self.on_exception,
        }

    def most_processes(self) -> int:
        """Most processes of the sandboxes of tools and reward, in each process of the environment."""
        return sum(sandbox.most_processes for sandbox in self._sandboxes())

    def programs_s(self) -> float:
        """Limit of the programs of a call or of the reward, in seconds; 0 if nothing runs any."""
        longest_s = max((sandbox.limits.timeout_s for sandbox in self._sandboxes()), default=0.0)
        if self.reward.path == "code":
            given = self.reward.arguments.get("sample_timeout_s", CODE_TIMEOUT_S)
            if isinstance(given, bool) or not isinstance(given, int | float):
                raise ValueError(f"reward.arguments.sample_timeout_s is {given!r}, expected seconds")
            longest_s += given
        return longest_s

    def _sandboxes(self) -> list[SandboxSettings]:
        from hybridflow.sandbox.config import SandboxSettings

        programs = [function for function in (*self.functions, self.reward) if function.path in ("python", "code")]
        return [SandboxSettings.model_validate(function.arguments.get("sandbox") or {}) for function in programs]


_REWARDS = {**{name: f"hybridflow.rewards.builtin:{name}" for name in BUILTIN_REWARDS}, **PROVIDED_REWARDS}
