"""Environments before a run starts: their classes and tools, imported in processes that end with the check."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridflow.data.files.config import FilesConfig
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.process_handle import start_once


def check_environment(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Import the class of an environment, or its tools. Returns the JSON schemas of these.

    Raises:
        UserError: one cannot be imported, is no environment or has no schema, or does not take its arguments.
    """
    return _schemas(config.model_dump_json())


@functools.lru_cache(maxsize=8)
def _schemas(config: str) -> list[dict[str, Any]]:
    environment = EnvironmentConfig.model_validate_json(config)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start_once(environment))
    with ThreadPoolExecutor(1) as threads:  # of a notebook
        return threads.submit(asyncio.run, start_once(environment)).result()


def with_tools(files: FilesConfig, environment: EnvironmentConfig | None) -> FilesConfig:
    """The data with the tools of an environment in every conversation.

    Raises:
        UserError: as `check_environment`.
    """
    if environment is None or environment.tools is None:
        return files
    chat = files.chat.model_copy(update={"tools": tuple(check_environment(environment))})
    return files.model_copy(update={"chat": chat})
