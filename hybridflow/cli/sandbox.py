"""`hybridflow sandbox`: runs programs for runs on other machines."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from hybridflow.cluster.hosts.run_token import find_token, needed
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.server import SandboxServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 127.0.0.1 if not given")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; any if not given")
    parser.add_argument("--at-a-time", type=int, default=4, metavar="N", help="programs that run at a time (4)")
    parser.add_argument("--python", type=Path, help="interpreter of programs; this one's if not given")
    parser.add_argument(
        "--read-only", type=Path, action="append", default=[], metavar="PATH", help="further files that programs read"
    )


def run(parsed: argparse.Namespace) -> int:
    """Serve until a signal comes.

    Raises:
        UserError: there is no token, this machine cannot isolate programs, or the address cannot be used.
    """
    settings = SandboxSettings(python=parsed.python, read_only=tuple(parsed.read_only), at_a_time=parsed.at_a_time)
    asyncio.run(_serve(settings, parsed.host, parsed.port, needed(find_token())))
    return 0


async def _serve(settings: SandboxSettings, host: str, port: int, token: str) -> None:
    sandbox = LocalSandbox(settings)
    await sandbox.start()
    server = SandboxServer(sandbox, host, port, token)
    server.start()
    print(f"sandbox: {server.address}, {sandbox.means}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await asyncio.to_thread(server.close)
    await sandbox.close()
