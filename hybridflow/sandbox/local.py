"""Sandbox on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.confinement import (
    INPUT,
    Confinement,
    environment_of,
    find_confinement,
    find_python,
    shell_command,
    unusable,
    words_of,
)
from hybridflow.sandbox.process import ProgramProcess
from hybridflow.sandbox.program import ProgramLimits, SandboxError, SandboxProgram, SandboxResult, Verdict


class _Runner(Protocol):
    """Means to run a program."""

    async def run(self, program: SandboxProgram, limits: ProgramLimits) -> SandboxResult:
        """Run a program. Raises SandboxError."""


class LocalSandbox:
    """Runs programs on this machine, as of `Sandbox`.

    Args:
        settings: of the sandbox.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._starting = asyncio.Lock()
        self._runner: _Runner | None = None
        self._slots = asyncio.Semaphore(settings.at_a_time)
        self._running: set[asyncio.Task[SandboxResult]] = set()

    async def start(self) -> None:
        """Find the means of this machine, and run a program that looks around. Errors as of `Sandbox`."""
        async with self._starting:
            if self._runner is not None:
                return
            if self._settings.isolation == "none":
                python, _ = await asyncio.to_thread(find_python, self._settings)
                self._runner = _Unconfined(python)
                return
            confinement = await asyncio.to_thread(find_confinement, self._settings)
            probe = confinement.probe()
            assert probe.limits is not None
            try:
                result = await _Confined(confinement).run(probe, probe.limits)
            except SandboxError as error:
                raise unusable(str(error).removeprefix("sandbox: ")) from None
            if result.verdict is not Verdict.EXITED or result.stdout:
                lines = (result.stdout or result.stderr).decode(errors="replace").strip().splitlines()
                raise unusable((lines or [f"a first program: {result.verdict}"])[-1])
            self._runner = _Confined(confinement)

    @property
    def means(self) -> str:
        """Means that confine programs, in words. After `start`."""
        return str(self._runner)

    async def run(self, program: SandboxProgram) -> SandboxResult:
        """Run a program once a slot is free. Errors as of `Sandbox`."""
        if self._runner is None:
            await self.start()
        assert self._runner is not None
        async with self._slots:
            task = asyncio.create_task(self._runner.run(program, program.limits or self._settings.limits))
            self._running.add(task)
            try:
                return await task
            finally:
                task.cancel()
                self._running.discard(task)

    async def close(self) -> None:
        """Kill the programs that run."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class _Confined:
    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement

    def __str__(self) -> str:
        return str(self._confinement)

    async def run(self, program: SandboxProgram, limits: ProgramLimits) -> SandboxResult:
        contents = {INPUT: program.stdin, **program.files, "": self._confinement.filter}
        with _descriptors(contents) as descriptors:
            filter_descriptor = descriptors.pop("")
            command = self._confinement.command(program, limits, descriptors, filter_descriptor)
            process = ProgramProcess(command, limits, (*descriptors.values(), filter_descriptor))
            # The first process of the namespace shows its environment to the program.
            return await process.run({}, "/")


class _Unconfined:
    """Runs programs as this user, with limits of resources alone, in a directory of their own.

    Args:
        python: interpreter of programs.
    """

    def __init__(self, python: Path) -> None:
        self._python = python

    def __str__(self) -> str:
        return "no isolation (isolation: none), limits of resources"

    async def run(self, program: SandboxProgram, limits: ProgramLimits) -> SandboxResult:
        try:
            with tempfile.TemporaryDirectory(prefix="hybridflow-program-", ignore_cleanup_errors=True) as directory:
                work = Path(directory, "work")
                for name, content in program.files.items():
                    (work / name).parent.mkdir(parents=True, exist_ok=True)
                    (work / name).write_bytes(content)
                work.mkdir(exist_ok=True)
                Path(directory, "input").write_bytes(program.stdin)
                command = shell_command(
                    limits, words_of(program, self._python), processes=None, stdin=f"{directory}/input"
                )
                process = ProgramProcess(command, limits, (), namespace=False)
                return await process.run(environment_of(self._python, str(work)), str(work))
        except OSError as error:
            raise SandboxError(f"sandbox: the files of a program: {error.strerror}") from None


@contextlib.contextmanager
def _descriptors(contents: dict[str, bytes]) -> Iterator[dict[str, int]]:
    """Descriptors to read contents from, by their names.

    Raises:
        SandboxError: the machine has none left.
    """
    descriptors: dict[str, int] = {}
    try:
        for name, content in contents.items():
            descriptors[name] = os.memfd_create("program", os.MFD_CLOEXEC)
            view = memoryview(content)
            while view:
                view = view[os.write(descriptors[name], view) :]
            os.lseek(descriptors[name], 0, os.SEEK_SET)
        yield dict(descriptors)
    except OSError as error:
        raise SandboxError(f"sandbox: the files of a program: {error.strerror}") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
