"""The tool `python`: runs a program that the model wrote in the sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

from engine3d.errors import UserError
from hybridflow.environments.tools.functions import ToolFailureError
from hybridflow.remote.endpoint import settings_of
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.opening import open_sandbox
from hybridflow.sandbox.program import SandboxError, Verdict, python_program


class PythonTool:
    """Runs programs in a sandbox of its own.

    Args:
        sandbox: settings, as of `SandboxSettings`.
        most_characters: of an answer, of which the middle is left out.

    Raises:
        ValueError: programs cannot run as the settings ask.
    """

    name = "python"

    def __init__(self, sandbox: dict[str, Any] | None = None, most_characters: int = 4000) -> None:
        settings = settings_of(SandboxSettings, sandbox or {})
        if most_characters < 1:
            raise ValueError(f"most_characters={most_characters}, expected at least 1")
        self._most_characters = most_characters
        asyncio.run(_check(settings))
        self._sandbox = open_sandbox(settings)

    async def __call__(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: The program.
        """
        try:
            result = await self._sandbox.run(python_program(code))
        except (SandboxError, UserError) as error:
            raise ToolFailureError(str(error)) from None
        text = result.stdout.decode(errors="replace").strip()
        if result.verdict is not Verdict.EXITED:
            errors = result.stderr.decode(errors="replace").strip()
            text = "\n".join(filter(None, (text, errors, f"error: {result.verdict.value}")))
        if len(text) <= self._most_characters:
            return text
        half = self._most_characters // 2
        return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


async def _check(settings: SandboxSettings) -> None:
    sandbox = open_sandbox(settings)
    try:
        await sandbox.start()
    except (UserError, SandboxError) as error:
        raise ValueError(str(error)) from None
    finally:
        await sandbox.close()
