"""A Ray of this process's own that no other user of the host can reach, read or steer.

Its files lie within a directory that only this user may enter, its servers listen on the loopback interface alone, who
calls them needs a token that is made for it, and its workers import from where the driver does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.job_config import JobConfig

_INTERFACE = "lo"


class PrivateEnvironment:
    """The environment in which this process uses a Ray of its own, from before its start until after its end.

    Args:
        variables: values, or None for what must not be set.
    """

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        self._before = {name: os.environ.get(name) for name in variables}
        _set_environment(variables)
        forget_token()

    def close(self, *, forget: bool = True) -> None:
        """Have the environment as it was.

        Args:
            forget: the token too. A Ray that was not shut down has threads in this process that still ask with it.
        """
        _set_environment(self._before)
        if forget:
            forget_token()


def rank_environment() -> dict[str, str]:
    """Environment in which a rank's process groups listen on the loopback interface alone."""
    return {"GLOO_SOCKET_IFNAME": _INTERFACE, "NCCL_SOCKET_IFNAME": _INTERFACE}


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started in the block take the loopback address for that of its host."""
    # Ray reads the variable when it is imported, and that is done.
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def driver_imports() -> JobConfig:
    """A job whose workers import from where this process does, and from the working directory only if it does."""
    config = JobConfig()
    # Each worker puts one after another in front of its own.
    config._py_driver_sys_path = _Final(entry or str(Path.cwd()) for entry in reversed(sys.path))
    return config


class _Final(list[str]):
    def extend(self, values: Iterable[str]) -> None:
        """Ray would add the directory of the script, which is there already, and the working directory."""


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def forget_token() -> None:
    """Have Ray's libraries in this process read mode and token again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
