"""Host 0's side of a launch: gathers the agents of all hosts, starts the driver, and ends everything together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence

from engine3d.errors import EngineError, UserError
from hybridflow.cluster.hosts.attempts import Attempts
from hybridflow.cluster.hosts.channel import LINE_BYTES, Channel, ChannelError, Message, WrongTokenError, accept
from hybridflow.cluster.hosts.checks.comparison import Finding, by_value
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.launch_plan import CANNOT_START, Ended, LaunchPlan
from hybridflow.cluster.hosts.members import Member
from hybridflow.cluster.hosts.network.network_settings import PORTS_OF_A_HOST
from hybridflow.cluster.processes.termination import SAVE
from hybridflow.errors.log import log

BEAT_S = 1.0
"""Between two signs of life of a host."""
_SAY_EVERY_S = 10.0
_END_S = 60.0
_SILENT_S = 5.0
"""Without a sign of life, after which another agent of the same host may take over."""
_SAME_S = 10.0
"""Within which requests for a checkpoint that come to several hosts are one."""
_ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def say(lines: str) -> None:
    """Say lines on stderr."""
    print("\n".join(f"hybridflow: {line}" for line in lines.splitlines()), file=sys.stderr, flush=True)


class Supervisor:
    """The supervisor of a launch.

    Args:
        plan: what to do.
        token: of the run.
    """

    def __init__(self, plan: LaunchPlan, token: str) -> None:
        self._plan, self._token = plan, token
        self._members: dict[int, Member] = {}
        self._changed = asyncio.Event()
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._signals: set[tuple[int, int]] = set()
        self._save_asked_s = float("-inf")
        self._attempts: Attempts | None = None
        self._ending = False

    async def run(self, listening: socket.socket) -> int:
        """Gather the hosts, run the command, and end the agents; the exit code of all.

        Raises nothing that happens on the way: it is said on stderr.

        Args:
            listening: socket for the agents.
        """
        server = await asyncio.start_server(self._joins, sock=listening, limit=LINE_BYTES)
        try:
            ended = await self._until_over(self._work())
        finally:
            server.close()
        if ended.lines is not None:
            say(ended.lines)
        await self._end(ended)
        return ended.code

    def signalled(self, number: int, host: Host | None = None) -> None:
        """A signal came, on this host or on another: the driver gets it; without one the launch is over.

        A scheduler sends its signal to all hosts, and not at one moment: the driver takes a second one for impatience,
        so that it gets each once, and again from a host that had it before. Of requests for a checkpoint it gets one in
        so many seconds, whichever host they come to.
        """
        came = (host.index if host is not None else 0, number)
        if number == SAVE:
            now, before = time.monotonic(), self._save_asked_s
            if now - before < _SAME_S:
                return
            self._save_asked_s = now
        elif number in {before for _, before in self._signals} and came not in self._signals:
            self._signals.add(came)
            return
        self._signals.add(came)
        if self._attempts is not None and self._attempts.is_running:
            where = "" if host is None or host.index == 0 else f" on {host}"
            if where:
                log.warning(f"{signal.Signals(number).name}{where}")
            self._attempts.send_signal(number)
        elif number != SAVE:
            self._finish(128 + number, _ENDS.get(signal.Signals(number), signal.Signals(number).name))

    async def _until_over(self, work: Awaitable[Ended]) -> Ended:
        task = asyncio.ensure_future(work)
        watch = asyncio.create_task(self._watch())
        await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                with contextlib.suppress(EngineError, UserError):
                    return task.result()
                error = task.exception()
                return Ended(2 if isinstance(error, UserError) else 1, str(error))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError, UserError):
                await task
            return self._over.result()
        finally:
            watch.cancel()

    async def _work(self) -> Ended:
        await self._gather()
        members = [self._members[index] for index in range(self._plan.hosts)]
        self._has_begun = True
        if lines := [f"hosts: {finding}" for finding in find_differences(members, self._plan.spares)]:
            return Ended(2, "\n".join([*lines, *([CANNOT_START] if self._plan.is_doctor else [])]))
        if len(members) > 1 or self._plan.is_doctor:
            _log_settings(members)
        self._attempts = Attempts(self._plan, self._members, self._is_asked_to_end)
        return await self._attempts.run()

    def _is_asked_to_end(self) -> bool:
        return any(number != SAVE for _, number in self._signals)

    async def _gather(self) -> None:
        """Wait until every host is there."""
        hosts, begin, said = self._plan.hosts, time.monotonic(), time.monotonic()
        while len(self._members) < hosts:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)
            now = time.monotonic()
            if len(self._members) < hosts and now - begin > self._plan.limits.gather_s:
                raise EngineError(
                    f"{self._missing()}, after {self._plan.limits.gather_s:g} s; none of them has connected"
                )
            if now - said >= _SAY_EVERY_S:
                said = now
                log.info(f"{self._missing()}, for {now - begin:.0f} s")
        if hosts > 1:
            names = listed([str(self._members[index].host) for index in range(hosts)])
            log.info(f"{hosts} hosts after {time.monotonic() - begin:.1f} s: {names}")

    def _missing(self) -> str:
        missing = [f"host {index}" for index in range(self._plan.hosts) if index not in self._members]
        there = listed([str(member.host) for _, member in sorted(self._members.items())])
        return f"waiting for {len(missing)} of {self._plan.hosts} hosts: {listed(missing)} (there: {there or 'none'})"

    async def _joins(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends, or this process does."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._serve_member(reader, writer)

    async def _serve_member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await accept(reader, writer, self._token)
        except ChannelError as error:
            if isinstance(error, WrongTokenError):
                log.warning(f"{(writer.get_extra_info('peername') or ['?'])[0]} was refused: {error}")
            writer.close()
            return
        member: Member | None = None
        try:
            member = self._admitted(await channel.receive(), channel)
            while True:
                self._receive(member, await channel.receive())
        except UserError as error:
            channel.send("end", code=2, lines=str(error))
        except ChannelError as error:
            if member is not None:
                self._gone(member, f"its agent is gone: {error}")
        if member is not None:
            member.leave()
        await channel.close()

    def _admitted(self, hello: Message, channel: Channel) -> Member:
        try:
            member = Member(hello, channel)
        except (KeyError, TypeError):
            name = str((hello.get("host") or {}).get("name", "a host"))
            line = f"{name} has another version of hybridflow than host 0; expected the same on every host"
            log.warning(line)
            raise UserError(line) from None
        host = member.host
        if self._has_begun and not (self._attempts is not None and self._attempts.takes_hosts):
            raise UserError(f"{host}: the run has begun without this host; it has {self._plan.hosts}")
        if not 0 <= host.index < self._plan.hosts:
            raise UserError(f"{host}: host {host.index} of {self._plan.hosts}, expected 0 to {self._plan.hosts - 1}")
        if self._has_begun:
            self._forget_silent(host)
        if (other := self._members.get(host.index)) is not None and not other.gone.is_set():
            raise UserError(f"{host} and {other.host} are both host {host.index}; each host has a number of its own")
        if member.words_digest != self._plan.words_digest(self._token):
            here, there = " ".join(self._plan.shown_words), " ".join(member.words)
            raise UserError(f"{host} was started with {there!r}, host 0 with {here!r}; expected the same on every host")
        first = self._members.get(0)
        if (
            self._has_begun
            and first is not None
            and (member.must_agree, member.software) != (first.must_agree, first.software)
        ):
            line = f"{host} takes no place: its recipe, its code or a version is not that of {first.host}"
            log.warning(line)
            raise UserError(line)
        self._members[host.index] = member
        self._changed.set()
        if self._has_begun:
            log.warning(f"{host} is there again, and stands by")
        return member

    def _forget_silent(self, host: Host) -> None:
        """A host that has lost its power may be back before its silence says that it was lost."""
        other = self._members.get(host.index)
        if other is not None and other.host.name == host.name and time.monotonic() - other.seen > _SILENT_S:
            self._gone(other, "its agent was started anew")

    def _receive(self, member: Member, message: Message) -> None:
        member.seen = time.monotonic()
        match message["kind"]:
            case "answer":
                member.answered(message["ray"])
            case "signal":
                self.signalled(message["signal"], member.host)
            case "lost":
                self._lost(member.host, message["line"])
            case _:
                pass

    def _gone(self, member: Member, why: str) -> None:
        """A connection has ended, or tells nothing any more."""
        if self._ending or member.gone.is_set() or self._members.get(member.host.index) is not member:
            return
        member.leave()
        if not self._has_begun:
            del self._members[member.host.index]
            log.warning(f"{member.host} has left before all hosts were there: {why}")
            return
        if self._plan.restarts:
            member.channel.abort()  # where it still runs, its agent ends what it has of the run
        self._lost(member.host, why)

    def _lost(self, host: Host, why: str) -> None:
        """Something that the run needs is lost; before the command is run, the launch is over."""
        if self._attempts is None:
            self._finish(1, f"{host}: {why}")
        else:
            self._attempts.lost(host, why)

    def _finish(self, code: int, line: str | None) -> None:
        if not self._over.done():
            self._over.set_result(Ended(code, line))

    async def _watch(self) -> None:
        """Send signs of life, and look for those of all hosts."""
        while True:
            now = time.monotonic()
            for member in [member for member in self._members.values() if not member.gone.is_set()]:
                member.channel.send("beat")
                if now - member.seen > self._plan.limits.host_s:
                    since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - member.seen)))
                    self._gone(member, f"no sign of life since {since} (limits.host_s={self._plan.limits.host_s:g})")
            await asyncio.sleep(BEAT_S)

    async def _end(self, ended: Ended) -> None:
        """Tell every agent how it ended, and wait until each has put everything away."""
        self._ending = True
        for member in self._members.values():
            member.channel.send("end", code=ended.code, lines=ended.lines or ended.printed)
        waiting = [member for member in self._members.values() if member.host.index != 0]
        deadline = asyncio.get_running_loop().time() + _END_S
        for member in waiting:
            try:
                async with asyncio.timeout_at(deadline):
                    await member.gone.wait()
            except TimeoutError:
                log.warning(f"{member.host}: its agent has not ended within {_END_S:g} s")


def find_differences(members: Sequence[Member], spares: int = 0) -> Iterator[Finding]:
    """Yield differences for which Ray is not started. Actors of Ray find all others, but on hosts that stand by.

    Args:
        members: all hosts of the launch, in order.
        spares: how many of them stand by, the last ones.
    """
    for what in members[0].must_agree:
        values = by_value((member.must_agree.get(what, "none"), member.host.name) for member in members)
        if len(values) > 1:
            yield Finding("refuse", what, tuple(values.items()))
    few = [member for member in members if member.free_ports is not None and member.free_ports < PORTS_OF_A_HOST]
    if few:
        values = by_value((f"{member.free_ports} free", member.host.name) for member in few)
        yield Finding("refuse", "network.ports", tuple(values.items()), f"at least {PORTS_OF_A_HOST}")
    first, standing_by = members[0], members[len(members) - spares :]
    if different := tuple(member.host.name for member in standing_by if member.software != first.software):
        expected = f"those of {first.host.name}"
        yield Finding("refuse", "code and versions of spares", (("others", different),), expected)


def _log_settings(members: Sequence[Member]) -> None:
    """Log network variables in force, in one line for the hosts that have the same."""
    texts = ((", ".join(map(str, member.settings)) or "nothing set", str(member.host)) for member in members)
    for text, names in by_value(texts).items():
        log.info(f"network of {listed(names)}: {text}")
