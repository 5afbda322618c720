"""`hybridflow agent`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridflow.cli import agent
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
    ("actor", "rollout", "gpus"),
    [
        ("cuda:0-1", "cpu:0", True),
        ("role:train", "role:rollout", True),
        ("node:0", "node:1", True),
        ("cpu:0-1", "cpu:0", False),
    ],
)
def test_hosts_are_compared_by_the_gpus_that_a_run_may_use(actor: str, rollout: str, gpus: bool) -> None:
    devices = [f"placement.actor={actor}", f"placement.rollout={rollout}", "placement.reward=role:reward"]
    _, preflight = agent._settings([DEMO, *devices])
    assert preflight.needs.gpus is gpus


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
