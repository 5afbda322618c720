"""Standard input of an agent: the token and signals come by it, and nobody else has it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from hybridflow.cli.launcher_input import obey_standard_input
from hybridflow.cluster.hosts.run_token import find_token
from engine3d.errors import UserError
got = []
def note(number, _):
    got.append(number)
    os.write(1, f"{signal.Signals(number).name}\\n".encode())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
try:
    obey_standard_input()
except UserError as error:
    sys.exit(str(error))
print(find_token(), os.read(0, 1), find_token(), flush=True)
while len(got) < int(sys.argv[1]):
    time.sleep(0.01)
"""


def started(signals: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(signals)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"HOME": "/none"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_token_then_signals_then_the_end(number: signal.Signals) -> None:
    with started(2) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("t" * 64 + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{'t' * 64} b'' None\n"
        process.stdin.write(f"\nNONSENSE\n{number.name.removeprefix('SIG')}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{number.name}\n"
        process.stdin.close()
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.wait(10) == 0


@pytest.mark.parametrize("given", ["", "half a line"])
def test_no_token(given: str) -> None:
    with started(0) as process:
        _, said = process.communicate(given, timeout=10)
    assert process.returncode == 1
    assert said == "--stdin: standard input has ended; expected the run's token on its first line\n"
