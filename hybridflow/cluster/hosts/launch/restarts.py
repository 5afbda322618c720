"""What becomes of a launch when a run of its command has ended: decisions alone, without hosts and processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hybridflow.cluster.hosts.description import Cluster, Host
from hybridflow.cluster.processes.termination import STOPPED_AFTER_SAVING

REFUSED = 2
"""Exit code of a command that has started nothing, because of what it was given."""
_NO_FAILURE = (0, REFUSED, STOPPED_AFTER_SAVING)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Attempt:
    """The hosts of one run of the command.

    Args:
        places: what the launch began with: its hosts without those that stand by.
        holders: the host at each place, as its own agent describes it; None where there is none left.
    """

    places: tuple[Host, ...]
    holders: tuple[Host | None, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its hosts, as the launcher counts them, in the order of their places."""
        return tuple(host.index for host in self.holders if host is not None)

    @property
    def is_whole(self) -> bool:
        """Whether there is a host at every place."""
        return None not in self.holders

    @property
    def cluster(self) -> Cluster:
        """As the run sees it: hosts counted in the order of their places, each with what its place is known to have."""
        held = [(place, host) for place, host in zip(self.places, self.holders, strict=True) if host is not None]
        return Cluster(
            tuple(
                replace(host, index=index, role=place.role, cpu_slots=place.cpu_slots)
                for index, (place, host) in enumerate(held)
            )
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the command ended.

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
        """What makes two failures the same: the step, and that a host was lost or else the line without its numbers."""
        if not self.step:
            return ""
        return f"{self.step}: {'a host was lost' if self.lost else _NUMBER.sub('N', self.line)}"


def first_attempt(hosts: Sequence[Host], spares: int) -> Attempt:
    """On all hosts of a launch but the last ones, which stand by."""
    places = tuple(hosts[: len(hosts) - spares])
    return Attempt(places, places)


def next_attempt(last: Attempt, staying: Collection[Host], there: Sequence[Host]) -> Attempt:
    """The hosts of the next run of the command: those that are left at their places, and others at the free places.

    Args:
        last: the attempt before.
        staying: hosts that were never gone: they keep the place that they have.
        there: all hosts that are there; of those without a place, the first that fits takes a free one.
    """
    holders = [host if host in staying else None for host in last.holders]
    others = [host for host in there if host not in holders]
    for index, place in enumerate(last.places):
        # One that is for the place's role before one that is for anything, and one that was never gone first.
        fitting = sorted(
            (host for host in others if fits(host, place)), key=lambda host: (host.role is None, host not in staying)
        )
        if holders[index] is None and fitting:
            holders[index] = fitting[0]
            others.remove(fitting[0])
    return Attempt(last.places, tuple(holders))


def fits(host: Host, place: Host) -> bool:
    """Whether a host can take a place: it is for anything or for the same role, and devices are counted as before."""
    return host.role in (None, place.role) and host.gpus == place.gpus and host.cpu_slots >= place.cpu_slots


def differences(last: Attempt, following: Attempt) -> list[str]:
    """What is other about the hosts of an attempt than about those of the one before, a line each."""
    lines = []
    for place, before, now in zip(last.places, last.holders, following.holders, strict=True):
        if now is not None and now != before:
            lines.append(f"{now} takes the place of {before or place}")
        elif now is None and before is not None:
            lines.append(f"no host takes the place of {before}")
    if not following.is_whole:
        lines.append(f"the run goes on with {len(following.numbers)} of {len(following.places)} hosts")
    return lines


def why_over(outcomes: Sequence[Outcome], restarts: int) -> str | None:
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
