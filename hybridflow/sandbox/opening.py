"""The sandbox that settings name: on this machine, or on another over HTTP."""

from __future__ import annotations

from engine3d.errors import UserError
from hybridflow.remote.endpoint import Endpoint, RequestCounts, RequestError
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import Sandbox, SandboxError, SandboxProgram, SandboxResult, Verdict
from hybridflow.sandbox.wire import MOST_BYTES, PATH, decode_result, encode_program


class RemoteSandbox:
    """Has a server run programs, as of `Sandbox`.

    Args:
        settings: with `remote`.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        assert settings.remote is not None
        self._limits = settings.limits
        self._endpoint = Endpoint(settings.remote, PATH)
        self._started = False

    async def start(self) -> None:
        """Run a first program on the server. Errors as of `Sandbox`."""
        if self._started:
            return
        try:
            self._endpoint.read_key()
            result = await self._run(SandboxProgram(("python3", "-c", "print(1)")))
        except (ValueError, SandboxError) as error:
            raise UserError(f"sandbox.remote: {str(error).removeprefix('sandbox: ')}") from None
        if result.verdict is not Verdict.EXITED or result.stdout != b"1\n":
            raise UserError(f"sandbox.remote: {self._endpoint.url}: a first program ended as {result.verdict}")
        self._started = True

    async def run(self, program: SandboxProgram) -> SandboxResult:
        """Run a program on the server. Errors as of `Sandbox`."""
        await self.start()
        return await self._run(program)

    async def _run(self, program: SandboxProgram) -> SandboxResult:
        content = encode_program(program, program.limits or self._limits)
        try:
            async with self._endpoint.slots:
                answer = await self._endpoint.post(content, RequestCounts(), MOST_BYTES)
            return decode_result(answer)
        except RequestError as error:
            raise SandboxError(f"sandbox: {error}") from None
        except ValueError as error:
            raise SandboxError(f"sandbox: {self._endpoint.url} answered {error}") from None

    async def close(self) -> None:
        """Release connections."""
        await self._endpoint.close()


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
