"""A sandbox on another machine: a server in a process of its own, and its client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.remote.endpoint import EndpointSettings
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.opening import open_sandbox
from hybridflow.sandbox.program import ProgramLimits, SandboxError, SandboxResult, Verdict, python_program
from hybridflow.sandbox.wire import decode_program, decode_result, encode_program, encode_result
from tests.hybridflow.sandbox.conftest import Run

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def url(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the command's server."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with subprocess.Popen(
        [sys.executable, "-m", "hybridflow", "sandbox", "--at-a-time", "2"],
        env={**os.environ, "HYBRIDFLOW_TOKEN_FILE": str(token)},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1].rstrip(",")
        server.terminate()
        assert server.wait(60) == 0


def _settings(url: str, variable: str = "SANDBOX_TOKEN") -> SandboxSettings:
    remote = EndpointSettings(url=url, api_key_variable=variable, retries=1, backoff_s=0.01)
    return SandboxSettings(remote=remote, limits=ProgramLimits(timeout_s=2, memory_mb=100, processes=8, output_mb=0.1))


async def _results(settings: SandboxSettings, *sources: str) -> list[SandboxResult]:
    sandbox = open_sandbox(settings)
    await sandbox.start()
    results = await asyncio.gather(*(sandbox.run(python_program(source, stdin=b"\xff")) for source in sources))
    await sandbox.close()
    return list(results)


@pytest.mark.processes
def test_programs_run_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    sources = [
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read() + b'\\0')",
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "while True: print('x' * 1000)",
        "raise SystemExit(3)",
    ]
    results = asyncio.run(_results(_settings(url), *sources))
    verdicts = [Verdict.EXITED, Verdict.TIMEOUT, Verdict.PROCESSES, Verdict.OUTPUT, Verdict.FAILED]
    assert [result.verdict for result in results] == verdicts
    assert results[0].stdout == b"\xff\0"
    assert results[-1].exit_code == 3


@pytest.mark.processes
def test_nobody_else_runs_programs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN[::-1])
    with pytest.raises(UserError, match=r"sandbox\.remote: .* 401"):
        asyncio.run(_results(_settings(url), "print(1)"))
    monkeypatch.delenv("SANDBOX_TOKEN")
    with pytest.raises(UserError, match=r"SANDBOX_TOKEN \(api_key_variable\) is not set"):
        asyncio.run(_results(_settings(url), "print(1)"))


@pytest.mark.processes
def test_what_is_no_program_is_refused(url: str) -> None:
    def status(path: str, body: bytes, token: str = TOKEN) -> int:
        request = urllib.request.Request(url + path, body, {"Authorization": f"Bearer {token}"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        return caught.value.code

    program = encode_program(python_program("print(1)"), ProgramLimits())
    assert status("/run", b"{") == 400
    assert status("/run", json.dumps({**program, "command": []}).encode()) == 400
    assert status("/run", json.dumps({**program, "files": {"../x": ""}}).encode()) == 400
    assert status("/run", json.dumps({**program, "command": ["\ud800"]}).encode()) == 400
    assert status("/run", bytes(1 << 20), token="x") == 401
    assert status("/other", json.dumps(program).encode()) == 404
    assert status("/run", json.dumps(program).encode(), token="x") == 401


@pytest.mark.processes
def test_a_lost_server_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    sandbox = open_sandbox(_settings("http://127.0.0.1:1"))
    with pytest.raises(UserError, match="could not be reached"):
        asyncio.run(sandbox.start())
    sandbox._started = True  # type: ignore[attr-defined]
    with pytest.raises(SandboxError, match="could not be reached"):
        asyncio.run(sandbox.run(python_program("print(1)")))


def test_programs_and_results_as_json() -> None:
    program, limits = python_program("x", stdin=b"\xff", files={"a/b": b"\0"}), ProgramLimits(timeout_s=3)
    decoded = decode_program(json.loads(json.dumps(encode_program(program, limits))))
    assert (decoded.command, decoded.files, decoded.stdin) == (program.command, program.files, program.stdin)
    assert decoded.limits == limits
    result = SandboxResult(Verdict.FAILED, 3, b"\xff", b"", 0.5)
    assert decode_result(json.loads(json.dumps(encode_result(result)))) == result
    encoded = encode_result(result)
    malformed: list[Any] = [None, [], {}, {**encoded, "verdict": "fine"}, {**encoded, "stdout": "%"}]
    for content in malformed:
        with pytest.raises(ValueError, match="expected the result of a program"):
            decode_result(content)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="python with remote"):
        SandboxSettings(remote=EndpointSettings(url="http://a/"), python=tmp_path)
    with pytest.raises(ValueError, match="expected more"):
        SandboxSettings(remote=EndpointSettings(url="http://a/", request_timeout_s=10))
