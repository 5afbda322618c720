"""Host 0's side of a launch: gathers the agents of all hosts, starts the driver, and ends everything together."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Channel, ChannelError, Message, WrongTokenError, accept, stream_limit
from hybridflow.cluster.hosts.description import Cluster, Host, listed
from hybridflow.cluster.hosts.driver_link import DESCRIPTOR
from hybridflow.cluster.hosts.run_token import derived
from hybridflow.errors.log import log

BEAT_S = 1.0
"""Between two signs of life of a host."""
RAY = "ray"
"""The use of the run's token that Ray's is derived for."""
_SAY_EVERY_S = 10.0
_END_S = 60.0
_GRACE_S = 5.0
_ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch is to do.

    Args:
        hosts: how many there are.
        words: of the command that host 0 runs once all are there, such as `["train", "recipe.yaml"]`.
        gather_s: until all hosts have come.
        lost_s: without a sign of life, after which a host is lost.
        stop_s: that the driver has to end in an orderly way.
        environments: gives the environment of the ranks on every host.
    """

    hosts: int
    words: Sequence[str]
    gather_s: float = 600.0
    lost_s: float = 30.0
    stop_s: float = 10.0
    environments: Callable[[Cluster], list[dict[str, str]]] = field(
        default=lambda cluster: [interface_environment(host.interface) for host in cluster.hosts]
    )


def interface_environment(interface: str | None) -> dict[str, str]:
    """Environment in which process groups find a network interface."""
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class Ended(Exception):  # noqa: N818: not always an error
    """The launch is over.

    Args:
        code: exit code of every agent.
        line: for stderr; None where it has been said.
    """

    def __init__(self, code: int, line: str | None = None) -> None:
        super().__init__(line or "")
        self.code, self.line = code, line


class _Member:
    """A host as its supervisor knows it."""

    def __init__(self, host: Host, channel: Channel) -> None:
        self.host, self.channel = host, channel
        self.seen = time.monotonic()
        self.gone = asyncio.Event()
        """Its connection has ended, or tells nothing any more."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Message]] = {}

    def take(self, message: Message) -> None:
        """Note an answer."""
        future = self._answers.pop(message["number"], None)
        if future is not None and not future.done():
            future.set_result(message)

    async def ask(self, kind: str, limit_s: float, **fields: Any) -> Message:
        """Ask its agent for something.

        Raises:
            EngineError: it cannot be done there, or there is no answer in time.
        """
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self.channel.send(kind, number=number, **fields)
        try:
            answer = await asyncio.wait_for(self._answers[number], limit_s)
        except TimeoutError:
            raise EngineError(f"{self.host}: no answer within {limit_s:g} s ({kind})") from None
        finally:
            self._answers.pop(number, None)
        if (error := answer.get("error")) is not None:
            raise EngineError(f"{self.host}: {error}")
        return answer


class Supervisor:
    """The supervisor of a launch.

    Args:
        plan: what to do.
        token: of the run.
    """

    def __init__(self, plan: LaunchPlan, token: str) -> None:
        self._plan, self._token = plan, token
        self._members: dict[int, _Member] = {}
        self._changed = asyncio.Event()
        self._over: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._driver: asyncio.subprocess.Process | None = None
        self._to_driver: asyncio.StreamWriter | None = None
        self._ending = False
        self._signalled: set[int] = set()

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
            print(f"hybridflow: {ended.line}", file=sys.stderr, flush=True)
        await self._end(ended)
        return ended.code

    def signalled(self, number: int, host: Host | None = None) -> None:
        """A signal came, on this host or on another: the driver gets it; without one the launch is over.

        A launcher gives it to every host: the driver gets another one only once a host has.
        """
        index = 0 if host is None else host.index
        first, again = not self._signalled, index in self._signalled
        self._signalled.add(index)
        if not (first or again):
            return
        if self._driver is not None and self._driver.returncode is None:
            where = "" if host is None or host.index == 0 else f" on {host}"
            if where:
                log.warning(f"{signal.Signals(number).name}{where}: the run ends")
            with contextlib.suppress(ProcessLookupError):
                self._driver.send_signal(number)
        else:
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
        cluster = Cluster(tuple(self._members[index].host for index in range(self._plan.hosts)))
        self._has_begun = True
        for member in self._members.values():
            member.channel.send("begins", hosts=cluster.as_json())
        return Ended(await self._drive(cluster))

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
        member: _Member | None = None
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

    def _admitted(self, hello: Message, channel: Channel) -> _Member:
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
        member = self._members[host.index] = _Member(host, channel)
        self._changed.set()
        return member

    def _receive(self, member: _Member, message: Message) -> None:
        member.seen = time.monotonic()
        match message["kind"]:
            case "answer":
                member.take(message)
            case "signal":
                self.signalled(message["signal"], member.host)
            case "lost":
                self._lost(f"{member.host}: {message['line']}")
            case _:
                pass

    def _gone(self, member: _Member, why: str) -> None:
        """A connection has ended, or tells nothing any more."""
        if self._ending or member.gone.is_set() or self._members.get(member.host.index) is not member:
            return
        member.gone.set()
        if not self._has_begun:
            del self._members[member.host.index]
            log.warning(f"{member.host} has left before all hosts were there: {why}")
            return
        self._lost(f"{member.host}: {why}")

    def _lost(self, line: str) -> None:
        """Something that the run needs is lost: the driver says so and ends; without one the launch is over."""
        if self._driver is None or self._to_driver is None:
            self._finish(1, line)
        else:
            _tell(self._to_driver, "lost", line=line)
            asyncio.get_running_loop().call_later(self._plan.stop_s + _GRACE_S, self._finish, 1, line)

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

    async def _drive(self, cluster: Cluster) -> int:
        """Run the command on this host, and do for it what it asks of the others; its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._driver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "hybridflow",
                *self._plan.words,
                pass_fds=[theirs.fileno()],
                env=os.environ | {DESCRIPTOR: str(theirs.fileno())},
                # Ctrl-C is for the agent, which passes it on.
                start_new_session=True,
            )
        reader, self._to_driver = await asyncio.open_connection(sock=ours)
        _tell(
            self._to_driver,
            "begins",
            hosts=cluster.as_json(),
            ray_token=derived(self._token, RAY),
            environments=self._plan.environments(cluster),
        )
        serving = asyncio.create_task(self._serve_driver(reader, self._to_driver))
        try:
            code = await self._driver.wait()
        except asyncio.CancelledError:
            await self._end_driver()
            raise
        finally:
            serving.cancel()
            self._to_driver.close()
        if code < 0:
            log.error(f"the driver was killed by {signal.Signals(-code).name}")
        return code if code >= 0 else 128 - code

    async def _end_driver(self) -> None:
        assert self._driver is not None
        with contextlib.suppress(ProcessLookupError):
            self._driver.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._driver.wait(), self._plan.stop_s + _GRACE_S)
                return
            self._driver.kill()
            await self._driver.wait()

    async def _serve_driver(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()).endswith(b"\n"):
            message = json.loads(line)
            try:
                answer = await self._on_others(message)
                _tell(writer, "answer", **answer)
            except Exception as error:
                _tell(writer, "answer", error=first_line(error))

    async def _on_others(self, message: Message) -> Mapping[str, Any]:
        """Ask the agents of all hosts but the first; their answers in order."""
        kind, limit_s = message.pop("kind"), message.pop("limit_s")
        others = [self._members[index] for index in range(1, self._plan.hosts)]
        results = await asyncio.gather(
            *(member.ask(kind, limit_s, **message) for member in others), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return {"answers": results}

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


def _tell(writer: asyncio.StreamWriter, kind: str, **fields: Any) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
