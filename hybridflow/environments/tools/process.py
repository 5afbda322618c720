"""The process of environments of tools, which share their tools and their reward."""

from __future__ import annotations

import socket
from typing import Any

from hybridflow.environments.call_server import MOST_COUNTS
from hybridflow.environments.environment_process import run_environments
from hybridflow.environments.tools.functions import Tool
from hybridflow.environments.tools.tool_environment import ToolEnvironment
from hybridflow.rewards.processes.function_process import (
    RewardError,
    ScoringFunction,
    describe,
    encode_message,
    load_callable,
)

_OTHER_COUNTS = 8
"""Names of counts that are no tool's."""


def _load_tool(function: dict[str, Any], directory: str) -> Tool:
    loaded = load_callable(function["path"], directory)
    if isinstance(loaded, type):
        try:
            loaded = loaded(**function["arguments"])
        except Exception as error:
            raise RewardError(f"cannot be made with its arguments: {describe(error)}") from None
        if not callable(loaded):
            raise RewardError("is a class without __call__, expected a method with type hints")
    elif function["arguments"]:
        raise RewardError("is a function with arguments in the settings, expected a class that takes them")
    return Tool(loaded)


def _load_tools(functions: list[dict[str, Any]], directory: str) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for function in functions:
        try:
            tool = _load_tool(function, directory)
        except RewardError as error:
            raise RewardError(f"tool {function['path']} {error}") from None
        if tool.name in tools:
            raise RewardError(f"tools: two are named {tool.name!r}, expected a name of its own for each")
        tools[tool.name] = tool
    if len(tools) > MOST_COUNTS - _OTHER_COUNTS:
        raise RewardError(f"tools: {len(tools)} of them, expected at most {MOST_COUNTS - _OTHER_COUNTS}")
    return tools


def serve(connection: socket.socket, kind: type[ToolEnvironment], setup: dict[str, Any]) -> None:
    """Load the tools and serve their environments, as `environment_process` serves those of a class."""
    arguments = setup["arguments"]
    try:
        tools = _load_tools(arguments["functions"], setup["directory"])
        try:
            path = arguments["reward"]["path"]
            reward = ScoringFunction(
                load_callable(path, setup["directory"]), arguments["reward"]["arguments"], setup["fields"]
            )
        except RewardError as error:
            raise RewardError(f"reward {path} {error}") from None
    except RewardError as error:
        connection.sendall(encode_message({"error": str(error)}))
        return
    connection.sendall(encode_message({"replayable": False, "tools": [tool.schema for tool in tools.values()]}))
    run_environments(
        connection,
        lambda: kind(tools, reward, arguments["on_exception"], setup["tool_timeout_s"]),
        setup["most_characters"],
    )
