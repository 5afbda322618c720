"""Files of the user's code that decides samples and scores: environments, agents, tools and reward functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from engine3d.checkpoint.manifest import checksum
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.rewards.config import FILES_OF_FUNCTIONS, RewardConfig, function_path

_CODE = ".code"
"""End of the name of a file of code among the checksums of a run's files."""


def code_checksums(functions: Mapping[str, RewardConfig], environment: EnvironmentConfig | None) -> dict[str, str]:
    """Checksums of files of code, by the setting that names each. What they import is not in them.

    Args:
        functions: of rewards and costs.
        environment: of episodes; None without.
    """
    paths = {f"{setting}{_CODE}": Path(file) for setting, file in _files(functions, environment)}
    return {name: checksum(path) for name, path in paths.items() if path.is_file()}


def without_code(checksums: Mapping[str, str]) -> dict[str, str]:
    """The checksums of a run's files but those of code, with which it may change."""
    return {name: value for name, value in checksums.items() if not name.endswith(_CODE)}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of the files of code that both runs have and that differ."""
    return [name for name, value in now.items() if name.endswith(_CODE) and before.get(name, value) != value]


def _files(functions: Mapping[str, RewardConfig], environment: EnvironmentConfig | None) -> Iterator[tuple[str, str]]:
    """Setting and path of each file."""
    paths = [
        (f"{what}.functions.{function.name}", function.path)
        for what, config in functions.items()
        for function in config.functions
    ]
    if environment is not None:
        paths = [(f"environment.{name}", path) for name, path in _paths_of(environment)]
    for setting, path in paths:
        file = function_path(path).rpartition(":")[0] or path
        if file.endswith(FILES_OF_FUNCTIONS):
            yield setting, file


def _paths_of(environment: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Setting and path of the code of an environment."""
    if environment.path is not None:
        yield "path", environment.path
    if isinstance(environment.agent, str):
        yield "agent", environment.agent
    elif environment.agent is not None:
        yield from ((f"agent.{number}", word) for number, word in enumerate(environment.agent))
    if environment.tools is not None:
        yield from (
            (f"tools.functions.{number}", function.path) for number, function in enumerate(environment.tools.functions)
        )
        yield "tools.reward", environment.tools.reward.path
