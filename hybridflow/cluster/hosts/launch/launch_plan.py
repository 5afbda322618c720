"""What a launch is to do, and how it ended."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.cluster.hosts.checks.preflight import PreflightPlan

DOCTOR = "doctor"
"""The command that checks the hosts, and the recipe on them, without running it."""
CAN_START, CANNOT_START = "the run can start", "the run cannot start"
"""Last line of that command."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch is to do.

    Args:
        hosts: how many there are.
        words: of the command that host 0 runs once all are there, such as `["train", "recipe.yaml"]`.
        gather_s: until all hosts have come.
        lost_s: without a sign of life, after which a host is lost.
        stop_s: that the driver has to end in an orderly way.
        preflight: what is looked at before.
        restarts: how often the command is run again, with `resume=auto`, after a failure that is not the user's.
        spares: how many of the hosts stand by, the last ones; each takes the place of one that is lost.
        spare_s: for a host in place of a lost one, where the run does not fit on those that are left.
        program: that the words are given to.
    """

    hosts: int
    words: Sequence[str]
    gather_s: float = 600.0
    lost_s: float = 30.0
    stop_s: float = 10.0
    preflight: PreflightPlan = field(default_factory=PreflightPlan)
    restarts: int = 0
    spares: int = 0
    spare_s: float = 0.0
    program: Sequence[str] = (sys.executable, "-m", "hybridflow")

    @property
    def is_doctor(self) -> bool:
        """True if it ends after the checks."""
        return self.words[:1] == [DOCTOR]

    def of_command(self) -> LaunchPlan:
        """The plan of the command that host 0 runs once the hosts have passed: a doctor's checks the recipe on them."""
        if not self.is_doctor:
            return self
        return dataclasses.replace(self, words=["check", *self.words[1:]], restarts=0)


@dataclass(frozen=True)
class Ended:
    """A launch is over.

    Args:
        code: exit code of every agent.
        line: for stderr; None where it has been said.
    """

    code: int
    line: str | None = None
