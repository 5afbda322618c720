"""A Ray of this process's own that no other user of the host can reach, read or steer.

Its files lie within a directory that only this user may enter, its servers listen on the loopback interface alone, who
calls them needs a token that is made for it, and its workers import from where the driver does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.job_config import JobConfig

from hybridflow.cluster.runtime.authentication import AUTHENTICATION_MODE

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"
_TOKEN, _TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_REACHED_FROM_ELSEWHERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Its name is short: the path of a socket must stay below 108 characters.
_OF_RAY = "r"


class PrivateRay:
    """The directory and environment of a local Ray, from before its start until after its end.

    Args:
        directory: to which only this user has access.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        token = directory / "token"
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        changes = {AUTHENTICATION_MODE: "token", _TOKEN_FILE: str(token), _TOKEN: None, _REACHED_FROM_ELSEWHERE: "0"}
        self._before = {name: os.environ.get(name) for name in changes}
        _set_environment(changes)
        forget_token()

    @property
    def ray_directory(self) -> Path:
        """For Ray, which lets every user of the host write to the directory that it is given."""
        return self._directory / _OF_RAY

    def store_file(self, name: str) -> Path:
        """A new name of a file in which processes of this host can meet."""
        return self._directory / f"store-{name}-{uuid.uuid4().hex}"

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


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def forget_token() -> None:
    """Have Ray's libraries in this process read mode and token again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
