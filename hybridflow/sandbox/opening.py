"""The sandbox that settings name."""

from __future__ import annotations

from engine3d.errors import UserError
from hybridflow.sandbox.client import RemoteSandbox
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import Sandbox


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """The sandbox that settings name. `Sandbox.start` checks that it works."""
    return LocalSandbox(settings) if settings.remote is None else RemoteSandbox(settings)


async def means_of_this_machine() -> str:
    """Means that this machine has to confine programs, or what is missing: one line."""
    sandbox = LocalSandbox(SandboxSettings())
    try:
        await sandbox.start()
    except UserError as error:
        return str(error)
    return f"sandbox: {sandbox.means}"
