"""A host's part in having the logs of a run on host 0 too, where the two share no disk: it sends what is new.

No more than a little is on its way at a time: signs of life, which go over the same connection, are never behind much.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.logs.log_files import MOST_BYTES, NewOutput
from hybridflow.rundir.file_names import FLIGHT_RECORDER, LOGS
from hybridflow.rundir.heartbeat import forget_heartbeats
from hybridflow.rundir.lock import SHARDS, move_aside

SEND_EVERY_S = 1.0
RATE = 1 << 20
"""Bytes of logs that a host sends in a second, at most, while the run goes on."""
MOST_BEHIND = 4 << 20
"""Bytes of a log that wait to be sent, at most; then some are left out."""
LAST_S = 8.0
"""That sending all at once may take, at the end of a run, which nobody is to wait for long."""
_MOST_BEHIND_AT_LAST = 1 << 20
"""Bytes of a log then."""


class LogStream:
    """Of this host.

    Args:
        send: sends a message to host 0.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._output: NewOutput | None = None
        self._sending: asyncio.Task[None] | None = None
        self._number = 0
        """Of what was sent last."""
        self._kept = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    @property
    def actions(self) -> dict[str, Callable[..., Awaitable[Message | None]]]:
        """What host 0 can ask for, by the kind of the message."""
        return {"keep_logs": self._begin, "send_logs": self._send_all, "request_recordings": self._request_recordings}

    def kept(self, number: int) -> None:
        """Host 0 has what was sent to it under a number."""
        if number == self._number:
            self._kept.set()

    async def close(self) -> None:
        """Send nothing any more."""
        sending, self._sending, self._output = self._sending, None, None
        if sending is not None:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _begin(self, path: str, in_place: bool, processes: Sequence[str]) -> None:
        """Before the ranks start: make room for what they write, and send it from then on.

        Args:
            path: the run's directory.
            in_place: whether an earlier start of the run goes on.
            processes: of this host.
        """
        await self.close()
        run = Path(path)
        await asyncio.to_thread(_make_room, run, in_place)
        self._output = NewOutput(run, processes, socket.gethostname())
        await asyncio.to_thread(self._output.skip_present)
        self._sending = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        while True:
            sent = await self._send_some(MOST_BEHIND)
            await asyncio.sleep(max(SEND_EVERY_S if sent < MOST_BYTES else 0.0, sent / RATE))

    async def _send_all(self, last: bool) -> None:
        """Send all that there is, and stop if it is the last time."""
        deadline = time.monotonic() + LAST_S
        while await self._send_some(_MOST_BEHIND_AT_LAST) and time.monotonic() < deadline:
            pass
        if last:
            await self.close()

    async def _send_some(self, most_behind: int) -> int:
        """Bytes that were sent, beside heartbeats, once host 0 has them; 0 where nothing is new."""
        async with self._one_at_a_time:
            if self._output is None:
                return 0
            pieces = await asyncio.to_thread(self._output.read, MOST_BYTES, most_behind)
            if not pieces:
                return 0
            self._number += 1
            self._kept.clear()
            self._send("logs", number=self._number, pieces=[piece.as_json() for piece in pieces])
            await self._kept.wait()
            return sum(len(piece.data) for piece in pieces if not piece.is_whole)

    async def _request_recordings(self, path: str) -> None:
        """Have the ranks of this host write what torch's flight recorder has, as on host 0."""

        def request() -> None:
            directory = Path(path) / FLIGHT_RECORDER
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()

        await asyncio.to_thread(request)


def _make_room(run: Path, in_place: bool) -> None:
    """As the driver does on host 0; what an earlier run has logged here is kept under another name.

    Raises:
        UserError: nothing can be written there.
    """
    logs = run / LOGS
    try:
        run.mkdir(parents=True, exist_ok=True)
        for left_over in (run / SHARDS, run / FLIGHT_RECORDER):
            shutil.rmtree(left_over, ignore_errors=True)
        forget_heartbeats(logs)
        with contextlib.suppress(FileNotFoundError):  # another host has the same disk, and has done it
            if not in_place and any(logs.iterdir()):
                move_aside(logs)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir: cannot make {logs}: {error.strerror}") from None
