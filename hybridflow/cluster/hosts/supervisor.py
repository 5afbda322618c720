"""Host 0's side of a launch: gathers the agents of all hosts, starts the driver, and ends everything together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Channel, ChannelError, Message, WrongTokenError, accept, stream_limit
from hybridflow.cluster.hosts.description import Cluster, Host, listed
from hybridflow.cluster.hosts.driver_process import GRACE_S, DriverProcess
from hybridflow.cluster.hosts.host_records import keep_hosts
from hybridflow.cluster.hosts.launch_plan import LaunchPlan
from hybridflow.cluster.hosts.log_keeper import GatheredLogs
from hybridflow.cluster.hosts.members import Member, tell_settings
from hybridflow.cluster.hosts.network_settings import Setting, as_environment
from hybridflow.cluster.hosts.preflight import check_hosts
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.cluster.processes.termination import SAVE, STOPPED_AFTER_SAVING
from hybridflow.errors.log import log

BEAT_S = 1.0
"""Between two signs of life of a host."""
RAY = "ray"
"""The use of the run's token that Ray's is derived for."""
_SAY_EVERY_S = 10.0
_END_S = 60.0
_NO_FAILURE = (0, 2, STOPPED_AFTER_SAVING)
_NUMBER = re.compile(r"\d+")
_ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def say(lines: str) -> None:
    """Say lines on stderr."""
    print("\n".join(f"hybridflow: {line}" for line in lines.splitlines()), file=sys.stderr, flush=True)


class Ended(Exception):
    """The launch is over.

    Args:
        code: exit code of every agent.
        line: for stderr; None where it has been said.
    """

    def __init__(self, code: int, line: str | None = None) -> None:
        super().__init__(line or "")
        self.code, self.line = code, line


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
        self.confined: Callable[[], dict[str, str]] = dict
        """Environment in which the driver listens where it should; asked for before it starts."""
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._signals: set[tuple[int, int]] = set()
        self._driver: DriverProcess | None = None
        self._ending = False
        self._ending_late: asyncio.TimerHandle | None = None
        self._apart: list[int] = []
        """Hosts that do not see what host 0 has at `run_dir`."""
        self._logs = GatheredLogs([], [])

    async def run(self, listening: socket.socket) -> int:
        """Gather the hosts on a socket that listens, run the command, and end the agents; the exit code of all.

        Raises nothing that happens on the way: it is said on stderr.
        """
        server = await asyncio.start_server(self._joins, sock=listening, limit=stream_limit())
        try:
            ended = await self._until_over(self._work())
        finally:
            server.close()
        if ended.line is not None:
            say(ended.line)
        await self._end(ended)
        return ended.code

    def signalled(self, number: int, host: Host | None = None) -> None:
        """A signal came, on this host or on another: the driver gets it; without one the launch is over.

        A scheduler sends its signal to all hosts, and not at one moment: the driver takes a second one for impatience,
        so that it gets each once, and again from a host that had it before.
        """
        came = (host.index if host is not None else 0, number)
        if number in {each for _, each in self._signals} and came not in self._signals:
            self._signals.add(came)
            return
        self._signals.add(came)
        if self._driver is not None and self._driver.is_running:
            where = "" if host is None or host.index == 0 else f" on {host}"
            if where:
                log.warning(f"{signal.Signals(number).name}{where}")
            self._driver.send_signal(number)
        elif number != SAVE:
            self._finish(128 + number, _ENDS.get(signal.Signals(number), signal.Signals(number).name))

    async def _until_over(self, work: Awaitable[Ended]) -> Ended:
        task = asyncio.ensure_future(work)
        watch = asyncio.create_task(self._watch())
        await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if task.done():
            with contextlib.suppress(EngineError, UserError):
                return task.result()
            error = task.exception()
            return Ended(2 if isinstance(error, UserError) else 1, str(error))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return self._over.result()

    async def _work(self) -> Ended:
        await self._gather()
        members = [self._members[index] for index in range(self._plan.hosts)]
        cluster = Cluster(tuple(member.host for member in members))
        self._has_begun = True
        if len(members) > 1 or self._plan.is_doctor:
            self._apart = await check_hosts(members, self._plan.preflight, with_table=self._plan.is_doctor)
            tell_settings(members)
        if self._plan.is_doctor:
            return Ended(0)
        for member in members:
            member.channel.send("begins", hosts=cluster.as_json())
        return Ended(await self._drive_again(cluster))

    async def _drive_again(self, cluster: Cluster) -> int:
        """Run the command, and again after failures, as often as the plan allows; its last exit code."""
        words, before = list(self._plan.words), ""
        for restarts in itertools.count():
            code = await self._drive(cluster, words)
            if self._ending_late is not None:
                self._ending_late.cancel()
            asked = {number for _, number in self._signals} - {SAVE}
            lost = [member for member in self._members.values() if member.gone.is_set()]
            if code in _NO_FAILURE or asked or lost or restarts == self._plan.restarts:
                return code
            assert self._driver is not None
            step, line = self._driver.failure or ("", f"the driver ended with {code}")
            this = f"{step}: {_NUMBER.sub('N', line)}" if step else ""
            if this and this == before:
                log.error(f"the same failure in {step} again; the run is not started any more")
                return code
            before = this
            log.warning(f"starting the run again ({restarts + 1} of {self._plan.restarts}), after: {line}")
            words = [word for word in words if not word.startswith("resume=")] + ["resume=auto"]
            others = [self._members[index] for index in range(1, self._plan.hosts)]
            await asyncio.gather(*(member.ask("stop_ray", _END_S) for member in others))
        raise AssertionError  # count() has no end

    async def _gather(self) -> None:
        """Wait until every host is there."""
        wanted, begin, said = self._plan.hosts, time.monotonic(), time.monotonic()
        while len(self._members) < wanted:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)
            now = time.monotonic()
            if len(self._members) < wanted and now - begin > self._plan.gather_s:
                raise EngineError(f"{self._missing()}, after {self._plan.gather_s:g} s; none of them has connected")
            if now - said >= _SAY_EVERY_S:
                said = now
                log.info(f"{self._missing()}, for {now - begin:.0f} s")
        if wanted > 1:
            names = listed([str(self._members[index].host) for index in range(wanted)])
            log.info(f"{wanted} hosts after {time.monotonic() - begin:.1f} s: {names}")

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
            channel.send("end", code=2, line=str(error))
        except ChannelError as error:
            if member is not None:
                self._gone(member, f"its agent is gone: {error}")
        if member is not None:
            member.gone.set()
        await channel.close()

    def _admitted(self, hello: Message, channel: Channel) -> Member:
        host = Host(**hello["host"])
        if self._has_begun:
            raise UserError(f"{host}: the run has begun without this host; it has {self._plan.hosts}")
        if not 0 <= host.index < self._plan.hosts:
            raise UserError(f"{host}: host {host.index} of {self._plan.hosts}, expected 0 to {self._plan.hosts - 1}")
        if host.index in self._members:
            other = self._members[host.index].host
            raise UserError(f"{host} and {other} are both host {host.index}; each host has a number of its own")
        if (words := hello["words"]) != list(self._plan.words):
            raise UserError(
                f"{host} was started with {' '.join(words)!r}, host 0 with {' '.join(self._plan.words)!r}; expected "
                "the same on every host"
            )
        settings = [Setting(**each) for each in hello["settings"]]
        member = self._members[host.index] = Member(host, channel, settings)
        self._changed.set()
        return member

    def _receive(self, member: Member, message: Message) -> None:
        member.seen = time.monotonic()
        match message["kind"]:
            case "answer":
                member.take(message)
            case "signal":
                self.signalled(message["signal"], member.host)
            case "logs":
                self._logs.receive(member, message)
            case "lost":
                self._lost(member.host, message["line"])
            case _:
                pass

    def _gone(self, member: Member, why: str) -> None:
        """A connection has ended, or tells nothing any more."""
        if self._ending or member.gone.is_set() or self._members.get(member.host.index) is not member:
            return
        member.gone.set()
        if not self._has_begun:
            del self._members[member.host.index]
            log.warning(f"{member.host} has left before all hosts were there: {why}")
            return
        self._lost(member.host, why)

    def _lost(self, host: Host, why: str) -> None:
        """Something that the run needs is lost: the driver says so and ends; without one the launch is over."""
        line = f"{host}: {why}"
        if self._driver is None or not self._driver.is_running:
            self._finish(1, line)
        else:
            self._driver.tell_lost(host, line)
            limit_s = self._plan.stop_s + GRACE_S
            self._ending_late = asyncio.get_running_loop().call_later(limit_s, self._finish, 1, line)

    def _finish(self, code: int, line: str | None) -> None:
        if not self._over.done():
            self._over.set_result(Ended(code, line))

    async def _watch(self) -> None:
        """Send signs of life, and look for those of all hosts."""
        while True:
            now = time.monotonic()
            for member in list(self._members.values()):
                member.channel.send("beat")
                if now - member.seen > self._plan.lost_s:
                    since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - member.seen)))
                    self._gone(member, f"no sign of life since {since} (limits.host_s={self._plan.lost_s:g})")
            await asyncio.sleep(BEAT_S)

    async def _drive(self, cluster: Cluster, words: Sequence[str]) -> int:
        """Run the command on this host, and do for it what it asks of the others; its exit code."""
        members = [self._members[host.index] for host in cluster.hosts]
        apart = [number for number, host in enumerate(cluster.hosts) if host.index in self._apart]
        self._logs = GatheredLogs(members, apart)

        def begun(directory: Path) -> None:
            keep_hosts(directory, [(member.host, member.settings) for member in members], self._apart)

        self._driver = DriverProcess(cluster, self._on_others, self._logs, begun, self._plan.stop_s)
        environments = [as_environment(member.settings) for member in members]
        confined = await asyncio.to_thread(self.confined)
        return await self._driver.run(words, derived(self._token, RAY), environments, confined)

    async def _on_others(self, message: Message) -> list[Message]:
        """Ask the agents of all hosts but the first; their answers in order, or why there is none."""
        kind, limit_s = message.pop("kind"), message.pop("limit_s")

        async def of(member: Member) -> Message:
            try:
                return await member.ask(kind, limit_s, **message)
            except Exception as error:
                return {"error": first_line(error)}

        return await asyncio.gather(*(of(self._members[index]) for index in range(1, self._plan.hosts)))

    async def _end(self, ended: Ended) -> None:
        """Tell every agent how it ended, and wait until each has put everything away."""
        self._ending = True
        for member in self._members.values():
            member.channel.send("end", code=ended.code, line=ended.line)
        waiting = [member for member in self._members.values() if member.host.index != 0]
        deadline = asyncio.get_running_loop().time() + _END_S
        for member in waiting:
            try:
                async with asyncio.timeout_at(deadline):
                    await member.gone.wait()
            except TimeoutError:
                log.warning(f"{member.host}: its agent has not ended within {_END_S:g} s")
