"""The command of a launch, as a process of host 0: started, served with what it asks of the other hosts, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, first_line
from hybridflow.cluster.hosts.channel import Message, stream_limit
from hybridflow.cluster.hosts.description import Cluster, Host
from hybridflow.cluster.hosts.driver_link import DESCRIPTOR
from hybridflow.cluster.hosts.logs.log_keeper import QUESTIONS, GatheredLogs
from hybridflow.errors.log import log
from hybridflow.rundir.first_failure import FirstFailure, keep_cause, keep_earlier

GRACE_S = 5.0
"""Beyond what the driver has to end in an orderly way."""

_TOLD_S = 1.0


class DriverProcess:
    """One run of the command.

    Args:
        cluster: on which it runs.
        ask_others: what the driver asks of all other hosts; their answers in order.
        logs: of those hosts that share no disk with host 0.
        begun: is called with the run's directory, once that is known.
        stop_s: that it has to end in an orderly way.
        earlier: the cards of earlier runs of it, which are kept in the run's directory.
    """

    def __init__(
        self,
        cluster: Cluster,
        ask_others: Callable[[Message], Awaitable[list[Message]]],
        logs: GatheredLogs,
        begun: Callable[[Path], object],
        stop_s: float,
        earlier: Sequence[FirstFailure] = (),
    ) -> None:
        self._cluster, self._ask_others, self._stop_s, self._earlier = cluster, ask_others, stop_s, earlier
        self._logs, self._begun = logs, begun
        self._cause: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.directory: Path | None = None
        """Of the run, once it has said so."""
        self.failure: tuple[str, str] | None = None
        """Step and first line of what it says that it failed of."""

    @property
    def is_running(self) -> bool:
        """Whether it is there, and can be told something."""
        return self._writer is not None and self._process is not None and self._process.returncode is None

    async def run(
        self,
        program: Sequence[str],
        ray_token: str,
        environments: Sequence[dict[str, str]],
        confined: Mapping[str, str],
    ) -> int:
        """Run the command to its end; its exit code.

        Args:
            program: with its arguments.
            ray_token: of the run's Ray.
            environments: of the ranks on each host.
            confined: variables with which it listens where it should.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *program,
                pass_fds=[theirs.fileno()],
                env=os.environ | dict(confined) | {DESCRIPTOR: str(theirs.fileno())},
                # Ctrl-C is for the agent, which passes it on.
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=stream_limit())
        self._tell(
            "begins",
            hosts=self._cluster.as_json(),
            ray_token=ray_token,
            environments=list(environments),
            apart=self._logs.apart,
        )
        serving = asyncio.create_task(self._serve(reader))
        try:
            code = await self._process.wait()
            await asyncio.wait({serving}, timeout=_TOLD_S)  # for what it has said last
        except asyncio.CancelledError:
            await self.end()
            raise
        finally:
            serving.cancel()
            self._writer.close()
            await self._logs.finish()
        if code < 0:
            cause = self._cause or f"the driver was killed by {signal.Signals(-code).name}"
            if self._cause is None:
                log.error(cause)
            self._keep_failure(cause, self._cluster.head)
        return code if code >= 0 else 128 - code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def tell_lost(self, host: Host, line: str) -> None:
        """Tell it that a host, or what it needs there, is lost: it says so and ends."""
        self._tell("lost", line=line, host=str(host))

    async def end(self, cause: str | None = None) -> None:
        """End it, in an orderly way if it does so in time.

        Args:
            cause: what it is then said to have failed of.
        """
        assert self._process is not None
        self._cause = cause
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._stop_s + GRACE_S)
                return
            self._process.kill()
            await self._process.wait()

    def _tell(self, kind: str, **fields: Any) -> None:
        assert self._writer is not None
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        try:
            await self._answer(reader)
        except Exception as error:  # what would wait for an answer is to learn that none comes
            if not isinstance(error, ConnectionResetError):  # a driver that ended without reading the last answer
                log.error(f"the driver is answered no more: {type(error).__name__}: {first_line(error)}")
            assert self._writer is not None
            self._writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        while (line := await reader.readline()).endswith(b"\n"):
            message = json.loads(line)
            match message["kind"]:
                case "failed":
                    self.failure = message["step"], message["line"]
                case "directory":
                    self.directory = Path(message["path"])
                    self._begun(self.directory)
                    with contextlib.suppress(OSError):  # they have been said
                        keep_earlier(self.directory, self._earlier)
                case kind:
                    question = message.pop("question")
                    ask = self._logs.answer if kind in QUESTIONS else self._ask_others
                    self._tell("answer", question=question, answers=await ask(message))

    def _keep_failure(self, cause: str, host: Host) -> None:
        """The card of a failure that the driver cannot tell of."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError, UserError):
            keep_cause(self.directory, cause, host=str(host))
