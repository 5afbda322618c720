"""Settings of a sandbox."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine3d.settings import AbsolutePath, Settings
from hybridflow.remote.endpoint import EndpointSettings
from hybridflow.sandbox.program import ProgramLimits

_CONFINING = 4
"""Processes that confine a program, or start with it."""
_OF_THIS_MACHINE = ("isolation", "python", "read_only", "at_a_time")


class SandboxSettings(Settings):
    """Settings of a sandbox, the same for rewards and tools."""

    isolation: Literal["required", "none"] = "required"
    """Isolation of programs from network, files and processes of the machine. "required" refuses to run any where the
    machine cannot provide it. "none" runs them with limits of their resources alone, as this user, for code that is
    trusted."""
    python: AbsolutePath | None = None
    """Interpreter that programs of Python run with, such as that of a virtual environment with libraries for them. The
    run's own interpreter, without the run's libraries, if null."""
    read_only: tuple[AbsolutePath, ...] = ()
    """Further files and directories that programs may read."""
    at_a_time: int = Field(default=4, ge=1, le=1024)
    """Programs that run at a time, of each process that has a sandbox. Others wait."""
    limits: ProgramLimits = ProgramLimits()
    """Limits of each program."""
    remote: EndpointSettings | None = None
    """Sandbox on another machine, which `hybridflow sandbox` serves there. This machine if null. Its `in_flight` is the
    number of programs at a time."""

    @model_validator(mode="after")
    def _check(self) -> SandboxSettings:
        if self.remote is None:
            return self
        if given := [name for name in _OF_THIS_MACHINE if name in self.model_fields_set]:
            raise ValueError(f"{given[0]} with remote, whose server has its own; expected one of both")
        if self.remote.request_timeout_s <= self.limits.timeout_s:
            raise ValueError(
                f"remote.request_timeout_s={self.remote.request_timeout_s:g} for programs that take up to "
                f"limits.timeout_s={self.limits.timeout_s:g}, expected more"
            )
        return self

    @property
    def most_processes(self) -> int:
        """Most processes of all its programs on this machine, with those that confine them."""
        return 1 if self.remote is not None else self.at_a_time * (self.limits.processes + _CONFINING) + 1
