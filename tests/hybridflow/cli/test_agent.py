"""`hybridflow agent`: its options, and its standard input, by which the token and signals come unseen by others."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hybridflow.cli.main import main
from tests.support.runs import DEMO

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, time
from hybridflow.cli.agent import obey_standard_input
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


def test_an_agent_is_there_before_what_takes_seconds_to_import() -> None:
    # With 512 hosts on one file system these seconds are minutes.
    program = (
        "import sys, hybridflow.cli.main, hybridflow.cli.agent\n"
        "found = {'torch', 'ray', 'sglang', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--spares", "2", "--max-restarts", "1"], "--spares 2 of 2 hosts: expected at least 0 and at most 1"),
        (["--spares", "-1", "--max-restarts", "1"], "--spares -1 of 2 hosts: expected at least 0 and at most 1"),
        (["--spares", "1"], "--spares 1 without --max-restarts: a host that stands by would never be used"),
        (["--max-restarts", "-1"], "--max-restarts -1: expected at least 0"),
    ],
)
def test_spares_and_restarts_that_make_no_sense(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["agent", "--host", "1", "--hosts", "2", "--head", "host-0:29400", *options, "train", DEMO]
    assert main(given) == 2
    assert capsys.readouterr().err == f"hybridflow: {said}\n"


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
        assert process.wait(200) == 0


@pytest.mark.parametrize("given", ["", "half a line"])
def test_no_token(given: str) -> None:
    with started(0) as process:
        _, said = process.communicate(given, timeout=200)
    assert process.returncode == 1
    assert said == "--stdin: standard input has ended; expected the run's token on its first line\n"
