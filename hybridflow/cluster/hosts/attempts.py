"""The command of a launch, run on host 0 until it has ended well or nothing is left to try."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.driver_process import DriverProcess
from hybridflow.cluster.hosts.launch_plan import Ended, LaunchPlan
from hybridflow.cluster.hosts.members import Member
from hybridflow.cluster.hosts.restarts import (
    REFUSED,
    Attempt,
    CommandOutcome,
    differences,
    first_attempt,
    next_attempt,
    why_over,
)
from hybridflow.errors.log import log
from hybridflow.rundir.status.first_failure import FirstFailure, read_failure
from hybridflow.rundir.status.watching import read_position

_START_S = 60.0
"""Beyond `limits.ray_start_s`, for the answer of an agent that starts Ray."""
_STOP_S = 120.0
_SILENT_S = 5.0
"""Beyond the limit of a sign of life, until a host is known to be lost."""
_LOOK_EVERY_S = 1.0


class Attempts:
    """All runs of the command of a launch, each with a Ray of its own on its hosts.

    Args:
        plan: of the launch.
        members: all hosts by their numbers; those that come later are put in by the supervisor.
        is_asked_to_end: True once somebody has asked the launch to end.
    """

    def __init__(
        self, plan: LaunchPlan, members: MutableMapping[int, Member], is_asked_to_end: Callable[[], bool]
    ) -> None:
        self._plan, self._members, self._is_asked = plan, members, is_asked_to_end
        self._attempt = first_attempt([members[index].host for index in range(plan.hosts)], plan.spares)
        self._driver: DriverProcess | None = None
        self._outcomes: list[CommandOutcome] = []
        self._cards: list[FirstFailure] = []
        self._has_begun = False
        for member in members.values():
            member.stays = True

    @property
    def is_running(self) -> bool:
        """True if the command is."""
        return self._driver is not None and self._driver.is_running

    @property
    def takes_hosts(self) -> bool:
        """True if a host that comes now may still take a place."""
        is_short = not self._attempt.is_whole and self._plan.limits.spare_s > 0
        return is_short or len(self._outcomes) < self._plan.restarts

    def send_signal(self, number: int) -> None:
        """Send the command a signal."""
        assert self._driver is not None
        self._driver.send_signal(number)

    def lost(self, host: Host, why: str) -> None:
        """A host, or something that the run needs there, is lost: the command says so and ends, if it needs the host.

        Args:
            host: as its agent describes it.
            why: what is known of it.
        """
        line = f"{host}: {why}"
        if host.index not in self._attempt.numbers:
            log.warning(f"{line}; it has stood by")
        elif self._driver is not None:
            self._driver.lose(host, line)
        else:
            log.warning(line)

    async def run(self) -> Ended:
        """Run the command, and again after failures, as often as the plan allows.

        Raises:
            EngineError: a host does not end what it has of the run, so that it cannot be started again.
        """
        words = list(self._plan.words)
        while True:
            outcome = await self._run_once(words)
            if self._is_asked():
                return _ended(outcome)
            if self._outcomes and outcome.code == REFUSED:
                following = await self._wait_for_host()
                if following is None:
                    return self._refused(outcome)
                log.warning("; ".join(["starting the run again", *differences(self._attempt, following)]))
            else:
                self._outcomes.append(outcome)
                if (why := why_over(self._outcomes, self._plan.restarts)) is not None:
                    if why:
                        log.error(why)
                    return _ended(outcome)
                following = self._following()
                self._tell_restart(outcome, following)
                words = self._words_again()
            self._attempt = following

    def _words_again(self) -> list[str]:
        """The command's words for another start; one that has begun is not to be moved aside."""
        words = [word for word in self._plan.words if word != "--again"]
        return [*words, *(["overwrite=false"] if self._has_begun else []), "--again"]

    async def _run_once(self, words: Sequence[str]) -> CommandOutcome:
        """Run the command on a Ray of the attempt's hosts."""
        members = [self._members[number] for number in self._attempt.numbers]
        for member in members:
            member.stays = True
        driver = self._driver = DriverProcess(self._plan.limits.stop_s, self._cards)
        try:
            ray = await self._start_ray(members)
            if driver.cause is None:
                return await self._run_driver(driver, words, members, ray)
            line = driver.cause
        except EngineError as error:
            line = str(error)
        finally:
            self._driver = None
            # One that is silent for long enough is gone by then, and takes no part in the next attempt.
            limit_s = max(_STOP_S, self._plan.limits.host_s + _SILENT_S)
            await asyncio.gather(*(member.change_ray(limit_s) for member in members))
        log.error(line)
        return CommandOutcome(1, line=line, lost=any(member.gone.is_set() for member in members))

    async def _start_ray(self, members: Sequence[Member]) -> Message:
        """Start Ray on the hosts of this attempt, its head first; values that `DriverLink` has, if that has started.

        Raises:
            EngineError: a host does not answer.
        """
        slots, limit_s = [host.cpu_slots for host in self._attempt.hosts], self._plan.limits.ray_start_s + _START_S
        ray = await members[0].change_ray(limit_s, slots[0])
        if (address := ray.get("gcs_address")) is not None:
            joining = zip(members[1:], slots[1:], strict=True)
            await asyncio.gather(*(member.change_ray(limit_s, cpus, address) for member, cpus in joining))
        return ray

    async def _run_driver(
        self, driver: DriverProcess, words: Sequence[str], members: Sequence[Member], ray: Message
    ) -> CommandOutcome:
        code = await driver.run(
            [*self._plan.program, *words],
            ray.pop("ray_variables"),
            hosts=[asdict(host) for host in self._attempt.hosts],
            settings=[[asdict(setting) for setting in member.settings] for member in members],
            is_first=not self._outcomes,
            **ray,
        )
        step, line = driver.failure or ("", driver.cause or f"the driver ended with {code}")
        if driver.directory is not None:
            self._has_begun = True
            with contextlib.suppress(UserError):
                position = read_position(driver.directory)
                step = step or (f"step {position.step}" if position is not None and position.step else "")
                card = read_failure(driver.directory)
                self._cards += [card] if card is not None else []
        return CommandOutcome(code, step, line, lost=any(member.gone.is_set() for member in members))

    def _following(self) -> Attempt:
        """The hosts of the next run of the command."""
        there = [member for _, member in sorted(self._members.items()) if not member.gone.is_set()]
        staying = [member.host for member in there if member.stays]
        return next_attempt(self._attempt, staying, [member.host for member in there])

    async def _wait_for_host(self) -> Attempt | None:
        """The hosts of the next run once one has come in place of a lost one; None if none does in time."""
        limit_s = self._plan.limits.spare_s
        if self._attempt.is_whole or not limit_s:
            return None
        log.warning(f"the run does not fit on the hosts that are left: waiting for another, for {limit_s:g} s at most")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            following = self._following()
            if len(following.numbers) > len(self._attempt.numbers):
                return following
            await asyncio.sleep(_LOOK_EVERY_S)
        return None

    def _tell_restart(self, outcome: CommandOutcome, following: Attempt) -> None:
        number, restarts = len(self._outcomes), self._plan.restarts
        lines = [
            f"starting the run again ({number} of {restarts}), after: {outcome.line}",
            *differences(self._attempt, following),
        ]
        log.warning("; ".join([*lines, f"restarts left: {restarts - number}"]))

    def _refused(self, outcome: CommandOutcome) -> Ended:
        """The command has found that it cannot run as it was started again."""
        where = "again" if self._attempt.is_whole else "on the hosts that are left"
        waited = ""
        if not self._attempt.is_whole and self._plan.limits.spare_s:
            waited = f" (no other has come within limits.spare_s={self._plan.limits.spare_s:g})"
        first = self._outcomes[-1]
        line = first_line(Exception(outcome.line))
        return Ended(1, f"the run was not started {where}{waited}: {line}\nthe failure before: {first.line}")


def _ended(outcome: CommandOutcome) -> Ended:
    """The end of a launch whose command has printed why; bad input is for the other hosts too."""
    return Ended(outcome.code, printed=outcome.line if outcome.code == REFUSED else None)
