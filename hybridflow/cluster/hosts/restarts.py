"""Decisions about a launch when a run of its command has ended, without hosts and processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.processes.termination import STOPPED_AFTER_SAVING

REFUSED = 2
"""Exit code of a command that has started nothing, because of what it was given."""
_NO_FAILURE = (0, REFUSED, STOPPED_AFTER_SAVING)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The hosts of one run of the command.

    Args:
        positions: hosts with which the launch began, without those that stand by.
        holders: the host at each position, as its own agent describes it; None where there is none left.
    """

    positions: tuple[Host, ...]
    holders: tuple[Host | None, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of its hosts, as the launcher counts them, in the order of their places."""
        return tuple(host.index for host in self.holders if host is not None)

    @property
    def is_whole(self) -> bool:
        """True if there is a host at every place."""
        return None not in self.holders

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts of the run: counted in the order of their places, with role and CPU slots of the place."""
        holders = [
            (position, host) for position, host in zip(self.positions, self.holders, strict=True) if host is not None
        ]
        return tuple(
            replace(host, index=index, role=position.role, cpu_slots=position.cpu_slots)
            for index, (position, host) in enumerate(holders)
        )


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """CommandOutcome of a run of the command.

    Args:
        code: its exit code.
        step: in which; empty where that is not known.
        line: what it failed of.
        lost: whether a host was lost.
    """

    code: int
    step: str = ""
    line: str = ""
    lost: bool = False

    @property
    def cause(self) -> str:
        """Identity of a failure: the step, and that a host was lost or else the line without its numbers."""
        if not self.step:
            return ""
        return f"{self.step}: {'a host was lost' if self.lost else _NUMBER.sub('N', self.line)}"


def first_attempt(hosts: Sequence[Host], spares: int) -> Attempt:
    """On all hosts of a launch but the last ones, which stand by."""
    positions = tuple(hosts[: len(hosts) - spares])
    return Attempt(positions, positions)


def next_attempt(last: Attempt, staying: Collection[Host], there: Sequence[Host]) -> Attempt:
    """The hosts of the next run of the command: those that are left at their places, and others at the free places.

    Args:
        last: the attempt before.
        staying: hosts that were never gone: they keep the place that they have.
        there: all hosts that are there; of those without a place, the first that fits takes a free one.
    """
    holders = [host if host in staying else None for host in last.holders]
    others = [host for host in there if host not in holders]
    for index, position in enumerate(last.positions):
        # One that is for the place's role before one that is for anything, and one that was never gone first.
        fitting = sorted(
            (host for host in others if fits(host, position)), key=lambda host: (host.role is None, host not in staying)
        )
        if holders[index] is None and fitting:
            holders[index] = fitting[0]
            others.remove(fitting[0])
    return Attempt(last.positions, tuple(holders))


def fits(host: Host, position: Host) -> bool:
    """True if a host can take a place: it is for anything or for the same role, and devices are counted as before."""
    return host.role in (None, position.role) and host.gpus == position.gpus and host.cpu_slots >= position.cpu_slots


def differences(last: Attempt, following: Attempt) -> list[str]:
    """Differences between the hosts of an attempt and of the one before, a line each."""
    lines = []
    for position, before, now in zip(last.positions, last.holders, following.holders, strict=True):
        if now is not None and now != before:
            lines.append(f"{now} takes the place of {before or position}")
        elif now is None and before is not None:
            lines.append(f"no host takes the place of {before}")
    if not following.is_whole:
        lines.append(f"the run goes on with {len(following.numbers)} of {len(following.positions)} hosts")
    return lines


def why_over(outcomes: Sequence[CommandOutcome], restarts: int) -> str | None:
    """Why the command is not run again; empty where nothing has to be said of it, None where it is run again.

    Args:
        outcomes: of all runs of it so far.
        restarts: how often it is run again at most.
    """
    last = outcomes[-1]
    if last.code in _NO_FAILURE or len(outcomes) > restarts:
        return ""
    if len(outcomes) > 1 and last.cause and last.cause == outcomes[-2].cause:
        return f"the same failure in {last.step} again; the run is not started any more"
    return None
