"""The plan of a launch, and its end."""

from __future__ import annotations

import hmac
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.cluster.hosts.network.network_settings import NetworkConfig
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.errors.redaction import redacted_words

DOCTOR = "doctor"
"""The command that checks the hosts, and the recipe on them, without running it."""
CAN_START, CANNOT_START = "the run can start", "the run cannot start"
"""Last line of that command."""


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch, the same on every host.

    Args:
        hosts: how many there are.
        words: of the command that host 0 runs once all are there, such as `["train", "recipe.yaml"]`.
        recipe: `recipe_hash` of the recipe as this host reads it. With the next two filled in by `take_part`.
        network: the recipe's.
        limits: of the run.
        restarts: runs of the command with `resume=auto` after a failure that is not the user's, at most.
        spares: hosts that stand by, the last ones; each takes the place of one that is lost.
        program: that gets the words.
    """

    hosts: int
    words: Sequence[str]
    recipe: str | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    restarts: int = 0
    spares: int = 0
    program: Sequence[str] = (sys.executable, "-m", "hybridflow")

    @property
    def is_doctor(self) -> bool:
        """True if the launch ends after the checks."""
        return self.words[:1] == [DOCTOR]

    @property
    def shown_words(self) -> list[str]:
        """The words without their secrets."""
        return redacted_words(self.words)

    def words_digest(self, token: str) -> str:
        """A digest of the words by which a host that has the run's token compares them."""
        return hmac.new(token.encode(), "\0".join(self.words).encode(), "sha256").hexdigest()


@dataclass(frozen=True)
class Ended:
    """The end of a launch.

    Args:
        code: exit code of every agent.
        lines: for stderr; None where the command has printed them.
        printed: lines that the command has printed, for the other hosts.
    """

    code: int
    lines: str | None = None
    printed: str | None = None
