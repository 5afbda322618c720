"""Host 0's part in having the logs of all hosts, where they share no disk: it keeps what agents send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine3d.errors import EngineError, first_line, shortened
from engine3d.input_files import JsonError, parse_json
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.logs.log_files import (
    HEARTBEAT_BYTES,
    MOST_BYTES,
    Piece,
    opened_directory,
    opened_file,
)
from hybridflow.cluster.hosts.logs.log_stream import LAST_S
from hybridflow.cluster.hosts.members import Member
from hybridflow.errors.log import log
from hybridflow.rundir.heartbeat import Heartbeat

RATE = 32 << 20
"""Bytes that are kept in a second, at most, of all hosts together."""
MOST_OF_A_FILE = 1 << 30
"""Bytes that one file may get from another host."""
QUESTIONS = ("keep_logs", "send_logs", "request_recordings")
"""What a driver asks for, of those hosts alone that share no disk with host 0."""
_LATEST = 1e11
"""Seconds since the epoch that a date can be made of."""
_BEGIN_S = 20.0
_MARGIN_S = 4.0


class LogKeeper:
    """Writes into the run's directory on host 0 what other hosts send, and nothing else.

    Args:
        run: the directory.
        expected: the processes of each host, such as `actor-1`.
        most_of_a_file: bytes; more is left out.
    """

    def __init__(
        self, run: Path, expected: Mapping[int, Collection[str]], most_of_a_file: int = MOST_OF_A_FILE
    ) -> None:
        self.run, self.expected, self._most = run, expected, most_of_a_file
        self._complained: set[tuple[int, str]] = set()

    def keep(self, host: Host, values: Sequence[Any]) -> int:
        """Add pieces to their files; how many bytes they have. What is no log of a rank there is told once.

        Raises nothing where a file cannot be written: a run does not depend on its logs.
        """
        nbytes = 0
        for each in values:
            try:
                piece = Piece.from_json(each)
                nbytes += len(piece.data)
                if piece.process not in self.expected.get(host.index, ()):
                    raise ValueError(f"{shortened(repr(piece.name))} is no log of a rank there")
                if nbytes > 2 * MOST_BYTES:
                    raise ValueError(f"more than {2 * MOST_BYTES:,} bytes at once")
                self._add(piece)
            except ValueError as error:
                self._complain(host, str(error))
            except OSError as error:
                self._complain(host, f"{piece.name} cannot be written: {error.strerror}")
        return nbytes

    def _add(self, piece: Piece) -> None:
        text = _checked_heartbeat(piece) if piece.is_whole else piece.data
        with opened_directory(self.run, piece.directory, make=True) as directory:
            flags = os.O_WRONLY | os.O_CREAT | (0 if piece.is_whole else os.O_APPEND)
            with opened_file(directory, piece.name, flags) as file:
                if piece.is_whole:
                    os.pwrite(file, text, 0)
                elif os.fstat(file).st_size + len(text) > self._most:
                    raise ValueError(f"{piece.name} has {self._most:,} bytes here; the rest of it stays there")
                else:
                    while text:
                        text = text[os.write(file, text) :]

    def _complain(self, host: Host, line: str) -> None:
        if (host.index, line) not in self._complained and len(self._complained) < 100:
            self._complained.add((host.index, line))
            log.warning(f"logs of {host}: {line}; left out")


def _checked_heartbeat(piece: Piece) -> bytes:
    """What a rank's own file has.

    Raises:
        ValueError: it is no heartbeat of the rank whose file it is.
    """
    try:
        beat = Heartbeat(**parse_json(piece.data))
        text = json.dumps(asdict(beat)).encode()
    except (JsonError, TypeError):
        raise ValueError(f"{piece.name} holds no heartbeat") from None
    if f"{beat.role}-{beat.rank}" != piece.process or len(text) >= HEARTBEAT_BYTES:
        raise ValueError(f"{piece.name} holds the heartbeat of another rank")
    times = (beat.since, beat.progressed, beat.at, 0.0 if beat.usual_s is None else beat.usual_s)
    counts = (beat.rank, beat.pid, beat.completed)
    if not (
        all(isinstance(each, str) and each.isprintable() for each in (beat.host, beat.method))
        and all(isinstance(each, int | float) and 0 <= each < _LATEST for each in times)
        and all(isinstance(each, int) and each >= 0 for each in counts)
    ):
        raise ValueError(f"{piece.name} holds no heartbeat")
    return text.ljust(HEARTBEAT_BYTES - 1) + b"\n"


class GatheredLogs:
    """The logs of a run of the driver, of those hosts that share no disk with host 0.

    Args:
        hosts: of the run, in the driver's order.
        apart: which of them do not see what host 0 has at `run_dir`.
    """

    def __init__(self, hosts: Sequence[Member], apart: Sequence[int]) -> None:
        self._hosts, self.apart = hosts, list(apart)
        self._keeper: LogKeeper | None = None
        self._pending: dict[int, tuple[Member, Message]] = {}
        """One of each host at most: it sends more when it hears that this was kept."""
        self._came = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def receive(self, member: Member, message: Message) -> None:
        """Note what a host has sent."""
        sound = isinstance(message.get("number"), int) and isinstance(message.get("pieces"), list)
        if sound and self._keeper is not None and member.host.index in self._keeper.expected:
            self._pending[member.host.index] = member, message
            self._came.set()

    async def answer(self, question: Message) -> list[Message]:
        """Do what the driver asks for, one of `QUESTIONS`; a message for each host that it is asked of."""
        kind = question["kind"]
        if kind == "keep_logs":
            return await self._begin(question["path"], question["in_place"], question["processes"])
        if self._keeper is None:
            return []
        if kind == "send_logs":
            return await self._ask(kind, LAST_S + _MARGIN_S, last=False)
        return await self._ask(kind, _MARGIN_S, path=str(self._keeper.run))

    async def finish(self) -> None:
        """Have what is left, at the end of a driver, and keep nothing more."""
        if self._keeper is None:
            return
        await self._ask("send_logs", LAST_S + _MARGIN_S, last=True)
        keeping, self._keeping, self._keeper = self._keeping, None, None
        if keeping is not None:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _begin(self, path: str, in_place: bool, processes: Mapping[str, Sequence[str]]) -> list[Message]:
        await self.finish()
        names = {self._hosts[number].host.index: processes.get(str(number), []) for number in self.apart}
        self._keeper, self._pending = LogKeeper(Path(path), names), {}
        self._keeping = asyncio.create_task(self._go_on(self._keeper))
        return await asyncio.gather(
            *(
                _told(member, "keep_logs", _BEGIN_S, path=path, in_place=in_place, processes=names[member.host.index])
                for member in self._members
            )
        )

    async def _ask(self, kind: str, limit_s: float, **fields: Any) -> list[Message]:
        there = [member for member in self._members if not member.gone.is_set()]
        return await asyncio.gather(*(_told(member, kind, limit_s, **fields) for member in there))

    @property
    def _members(self) -> list[Member]:
        return [self._hosts[number] for number in self.apart]

    async def _go_on(self, keeper: LogKeeper) -> None:
        """Keep what comes, one host after the other, and tell each when it may send more."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._pending:
                index = next(iter(self._pending))
                member, message = self._pending.pop(index)
                nbytes = await asyncio.to_thread(keeper.keep, member.host, message["pieces"])
                await asyncio.sleep(nbytes / RATE)
                member.channel.send("logs_kept", number=message["number"])


async def _told(member: Member, kind: str, limit_s: float, **fields: Any) -> Message:
    """The answer of a host's agent, or why there is none."""
    try:
        return await member.ask(kind, limit_s, **fields)
    except EngineError as error:
        return {"error": first_line(error)}
