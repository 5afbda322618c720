"""`hybridflow agent`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridflow.cli.main import main
from tests.support.runs import DEMO


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
