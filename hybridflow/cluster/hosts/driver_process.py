"""The command of a launch, as a process of host 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from hybridflow.cluster.driver_link import DESCRIPTOR
from hybridflow.cluster.hosts.channel import LINE_BYTES, Channel, ChannelError
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.ray.ray_host import changed_environment
from hybridflow.errors.log import log
from hybridflow.rundir.status.first_failure import FirstFailure, keep_cause, keep_earlier

_GRACE_S = 5.0
"""Beyond the driver's time for an orderly end."""

_LAST_LINES_S = 1.0


class DriverProcess:
    """One run of the command.

    Args:
        stop_s: of an orderly end.
        earlier: cards of earlier runs of it, which are kept in the run's directory.
    """

    def __init__(self, stop_s: float, earlier: Sequence[FirstFailure] = ()) -> None:
        self._stop_s, self._earlier = stop_s, earlier
        self._cause: tuple[str, str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._late: asyncio.Task[None] | None = None
        self._is_late = False
        self.directory: Path | None = None
        """Directory of the run, once it is known."""
        self.failure: tuple[str, str] | None = None
        """Step and lines of the command's own failure."""

    @property
    def is_running(self) -> bool:
        """True if it can be told something."""
        return self._channel is not None and self._process is not None and self._process.returncode is None

    async def run(self, program: Sequence[str], variables: Mapping[str, str | None], **first: Any) -> int:
        """Run the command to its end; its exit code.

        Args:
            program: with its arguments.
            variables: of its environment; None for those that must not be set.
            first: values that `DriverLink` has.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *program,
                pass_fds=[theirs.fileno()],
                env=changed_environment({**variables, DESCRIPTOR: str(theirs.fileno())}),
                # Ctrl-C is for the agent, which passes it on.
                start_new_session=True,
            )
        self._channel = channel = Channel(*await asyncio.open_connection(sock=ours, limit=LINE_BYTES))
        channel.send("launch", **first)
        if self._cause is not None:  # since the process was started
            channel.send("lost", line=self._cause[0], host=self._cause[1])
        reading = asyncio.create_task(self._read(channel))
        try:
            code = await self._process.wait()
            code = 1 if self._is_late else code
            await asyncio.wait({reading}, timeout=_LAST_LINES_S)
        except asyncio.CancelledError:
            await self.end()
            raise
        finally:
            if self._late is not None:
                self._late.cancel()
            reading.cancel()
            channel.abort()
        if code < 0:
            self._cause = self._cause or (f"the driver was killed by {signal.Signals(-code).name}", _name(first))
        if code and self.failure is None and self._cause is not None:
            log.error(self._cause[0])
            self._keep_failure(*self._cause)
        return code if code >= 0 else 128 - code

    @property
    def cause(self) -> str | None:
        """The cause of its end where it has told none: a loss, or the signal by which it was killed."""
        return self._cause[0] if self._cause is not None else None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def lose(self, host: Host, line: str) -> None:
        """Tell it that a host is lost, or something there that it needs: it says so and ends, or is ended."""
        self._cause = self._cause or (line, str(host))
        if self._channel is not None:
            self._channel.send("lost", line=line, host=str(host))
        if self.is_running and self._late is None:  # of several losses the first counts
            self._late = asyncio.create_task(self._end_late())

    async def _end_late(self) -> None:
        await asyncio.sleep(self._stop_s + _GRACE_S)
        self._is_late = True
        await self.end()

    async def end(self) -> None:
        """End it, in an orderly way if it does so in time."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._stop_s + _GRACE_S)
                return
            self._process.kill()
            await self._process.wait()

    async def _read(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                message = await channel.receive()
                if message["kind"] == "failed":
                    self.failure = message["step"], message["line"]
                else:
                    self.directory = Path(message["path"])
                    with contextlib.suppress(OSError):  # the cards were printed
                        keep_earlier(self.directory, self._earlier)

    def _keep_failure(self, cause: str, host: str) -> None:
        """Write the card of a failure that the driver cannot tell of."""
        if self.directory is not None:
            with contextlib.suppress(OSError, UserError):
                keep_cause(self.directory, cause, host=host)


def _name(first: Mapping[str, Any]) -> str:
    return str(Host(**first["hosts"][0]))
