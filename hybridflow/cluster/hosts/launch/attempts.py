"""The command of a launch, run on host 0 until it has ended well or nothing is left to try."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.checks.preflight import check_newcomer
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.launch.driver_process import GRACE_S, DriverProcess
from hybridflow.cluster.hosts.launch.host_records import keep_hosts
from hybridflow.cluster.hosts.launch.launch_plan import Ended, LaunchPlan
from hybridflow.cluster.hosts.launch.restarts import (
    REFUSED,
    Attempt,
    Outcome,
    differences,
    first_attempt,
    next_attempt,
    why_over,
)
from hybridflow.cluster.hosts.logs.log_keeper import GatheredLogs
from hybridflow.cluster.hosts.members import Member
from hybridflow.cluster.hosts.network.network_settings import as_environment
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.errors.log import log
from hybridflow.rundir.first_failure import FirstFailure, read_failure
from hybridflow.rundir.watching import read_position

RAY = "ray"
"""The use of the run's token that Ray's is derived for."""
_STOP_S = 60.0
_SILENT_S = 5.0
"""Beyond the limit of a sign of life, until a host is known to be lost."""
_LOOK_EVERY_S = 1.0


class Attempts:
    """All runs of the command of a launch.

    Args:
        plan: of the launch.
        token: of the run.
        members: all hosts by their numbers; those that come later are put in by the supervisor.
        confined: environment in which the command listens where it should; asked for before it starts.
        is_asked_to_end: whether somebody has asked the launch to end.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        token: str,
        members: MutableMapping[int, Member],
        confined: Callable[[], Mapping[str, str]],
        is_asked_to_end: Callable[[], bool],
    ) -> None:
        self._plan, self._token, self._members, self._is_asked = plan, token, members, is_asked_to_end
        self._confined = confined
        self.logs = GatheredLogs([], [])
        """Of those hosts that share no disk with host 0."""
        self._attempt = first_attempt([members[index].host for index in range(plan.hosts)], plan.spares)
        self._driver: DriverProcess | None = None
        self._outcomes: list[Outcome] = []
        self._cards: list[FirstFailure] = []
        self._late: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._ended_late: str | None = None
        self._has_begun = False

    @property
    def is_running(self) -> bool:
        """Whether the command is."""
        return self._driver is not None and self._driver.is_running

    @property
    def takes_hosts(self) -> bool:
        """Whether a host that comes now may still take a place."""
        is_short = not self._attempt.is_whole and self._plan.spare_s > 0
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
        elif self._driver is not None and self._driver.is_running:
            self._driver.tell_lost(host, line)
            if self._late is None:  # of several losses the first counts
                limit_s = self._plan.stop_s + GRACE_S
                self._late = asyncio.get_running_loop().call_later(limit_s, self._end_late, self._driver, line)
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
                return Ended(outcome.code, self._ended_late)
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
                    return Ended(outcome.code, self._ended_late)
                await self._stop_others()
                following = await self._following()
                self._tell_restart(outcome, following)
                words = self._words_again()
            self._attempt = following

    def _words_again(self) -> list[str]:
        """The command's words for another start.

        A run that has begun keeps in its directory from which checkpoint it started, until it has one of its own.
        """
        named = [word for word in self._plan.words if word.startswith("resume=")]
        if not self._has_begun and named and named[-1] not in ("resume=none", "resume=auto"):
            return list(self._plan.words)
        return [word for word in self._plan.words if word not in named] + ["resume=auto"]

    async def _run_once(self, words: Sequence[str]) -> Outcome:
        plan, cluster = self._plan, self._attempt.cluster
        members = [self._members[number] for number in self._attempt.numbers]
        for member in self._members.values():
            if not member.gone.is_set():
                member.channel.send("begins")
        self._ended_late = None
        self.logs = GatheredLogs(members, [number for number, member in enumerate(members) if member.is_apart])

        def begun(directory: Path) -> None:
            self._has_begun = True
            apart = [member.host.index for member in members if member.is_apart]
            keep_hosts(directory, [(member.host, member.settings) for member in members], apart)

        driver = DriverProcess(cluster, self._ask_others, self.logs, begun, plan.stop_s, self._cards)
        self._driver = driver
        environments = [as_environment(member.settings) for member in members]
        confined = await asyncio.to_thread(self._confined)
        code = await driver.run([*plan.program, *words], derived(self._token, RAY), environments, confined)
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._ending is not None:
            await self._ending
            self._ending = None
        step, line = driver.failure or ("", f"the driver ended with {code}")
        if driver.directory is not None:
            with contextlib.suppress(UserError):
                place = read_position(driver.directory)
                step = step or (f"step {place.step}" if place is not None and place.step else "")
                card = read_failure(driver.directory)
                self._cards += [card] if card is not None else []
        if self._ended_late is not None:
            code, line = 1, self._ended_late
        return Outcome(code, step, line, lost=any(member.gone.is_set() for member in members))

    def _end_late(self, driver: DriverProcess, line: str) -> None:
        """The command does not end of a loss by itself."""
        self._ended_late = line
        self._ending = asyncio.create_task(driver.end(line))

    async def _ask_others(self, message: Message) -> list[Message]:
        """Ask the agents of all hosts but the first; their answers in order, or why there is none."""
        kind, limit_s = message.pop("kind"), message.pop("limit_s")

        async def of(number: int, host: Host) -> Message:
            fields = message | ({"cpus": host.cpu_slots} if kind == "start_ray" else {})
            try:
                return await self._members[number].ask(kind, limit_s, **fields)
            except Exception as error:
                return {"error": first_line(error)}

        placed = zip(self._attempt.numbers, self._attempt.cluster.hosts, strict=True)
        return await asyncio.gather(*(of(number, host) for number, host in list(placed)[1:]))

    async def _stop_others(self) -> None:
        """End what is left of the run on all hosts but the first; who does not answer for long enough is lost."""
        limit_s = max(_STOP_S, self._plan.lost_s + _SILENT_S)

        async def stop(member: Member) -> None:
            try:
                await member.ask("stop_ray", limit_s)
            except EngineError:
                if not member.gone.is_set():
                    raise

        await asyncio.gather(*(stop(self._members[number]) for number in self._attempt.numbers[1:]))

    async def _following(self) -> Attempt:
        """The hosts of the next run of the command, those that came later compared with the others."""
        while True:
            there = [member for _, member in sorted(self._members.items()) if not member.gone.is_set()]
            staying = [member.host for member in there if member.is_checked]
            following = next_attempt(self._attempt, staying, [member.host for member in there])
            members = [self._members[number] for number in following.numbers]
            newcomer = next((member for member in members if not member.is_checked), None)
            if newcomer is None:
                return following
            others = [member for member in members if member.is_checked]
            try:
                newcomer.is_apart = not await check_newcomer(newcomer, others, self._plan.preflight)
            except UserError as error:
                self._dismiss(newcomer, str(error))
            except EngineError:
                if not any(member.gone.is_set() for member in members):
                    raise
            else:
                newcomer.is_checked = True

    def _dismiss(self, member: Member, lines: str) -> None:
        """A host that came later cannot take part."""
        log.warning(f"{member.host} takes no place:\n{lines}")
        member.channel.send("end", code=REFUSED, line=lines)
        member.leave()

    async def _wait_for_host(self) -> Attempt | None:
        """The hosts of the next run once one has come in place of a lost one; None if none does in time."""
        limit_s = self._plan.spare_s
        if self._attempt.is_whole or not limit_s:
            return None
        log.warning(f"the run does not fit on the hosts that are left: waiting for another, for {limit_s:g} s at most")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            following = await self._following()
            if len(following.numbers) > len(self._attempt.numbers):
                return following
            await asyncio.sleep(_LOOK_EVERY_S)
        return None

    def _tell_restart(self, outcome: Outcome, following: Attempt) -> None:
        number, restarts = len(self._outcomes), self._plan.restarts
        told = [
            f"starting the run again ({number} of {restarts}), after: {outcome.line}",
            *differences(self._attempt, following),
        ]
        log.warning("; ".join([*told, f"restarts left: {restarts - number}"]))

    def _refused(self, outcome: Outcome) -> Ended:
        """The command has found that it cannot run as it was started again."""
        where = "again" if self._attempt.is_whole else "on the hosts that are left"
        waited = ""
        if not self._attempt.is_whole and self._plan.spare_s:
            waited = f" (no other has come within limits.spare_s={self._plan.spare_s:g})"
        first = self._outcomes[-1]
        return Ended(1, f"the run was not started {where}{waited}: {outcome.line}\nthe failure before: {first.line}")
