"""`launch/torchrun.py` on one host: what it refuses, and what torchrun makes of an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts.launching import environment, small_run
from tests.support.runs import ROOT
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes


def test_it_is_for_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "launch/torchrun.py", "recipe.yaml"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hybridflow: launch/torchrun.py is for torchrun, which sets RANK, LOCAL_RANK, ")


def test_torchrun_ends_with_1_and_names_the_exit_code_of_the_run(tmp_path: Path) -> None:
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "run"]
    done = subprocess.run(
        [*torchrun, *rendezvous, "launch/torchrun.py", *small_run(tmp_path, "train.layout.tp=0")],
        env=environment(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("hybridflow: "))
    assert first.startswith("hybridflow: ") and "tp" in first, done.stderr
    assert "exitcode  : 2 " in done.stderr, done.stderr
