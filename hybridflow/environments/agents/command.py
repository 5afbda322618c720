"""An agent that is a program: any command, which plays one episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict

from hybridflow.environments.environment import Task


async def play(task: Task, base_url: str, api_key: str, command: Sequence[str]) -> None:
    """Run a command with the session in its environment, and the task as JSON on its standard input.

    Args:
        task: of the episode.
        base_url, api_key: of its session, as `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
        command: program and arguments.

    Raises:
        RuntimeError: the program has failed.
    """
    session = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, env=os.environ | session, start_new_session=True
    )
    try:
        await process.communicate(json.dumps(asdict(task)).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        raise RuntimeError(f"the program ended with exit code {process.returncode}")
