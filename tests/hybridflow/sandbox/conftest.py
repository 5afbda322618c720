"""A sandbox that all tests of a worker share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine3d.errors import UserError
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import ProgramLimits, SandboxResult, python_program

LIMITS = ProgramLimits(timeout_s=2, memory_mb=100, processes=8, files_mb=4, output_mb=0.1)

Run = Callable[..., SandboxResult]


def worker_mark() -> str:
    """Word in the command lines of all programs that this test worker runs."""
    return f"program-of-test-{os.getpid()}"


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs source code of Python in the sandbox: (source, stdin=b"", limits=LIMITS) -> SandboxResult."""
    sandbox = LocalSandbox(SandboxSettings())
    with asyncio.Runner() as runner:
        try:
            runner.run(sandbox.start())
        except UserError as error:
            pytest.skip(str(error))

        def run_source(source: str, stdin: bytes = b"", limits: ProgramLimits = LIMITS) -> SandboxResult:
            program = python_program(source, stdin=stdin, limits=limits)
            return runner.run(sandbox.run(replace(program, command=(*program.command, worker_mark()))))

        yield run_source
        runner.run(sandbox.close())
