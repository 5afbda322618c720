"""Rates between processes of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.processes

MEASURES = """
import json, os, socket, sys
from dataclasses import asdict
from engine3d.errors import EngineError
from hybridflow.cluster.hosts.network.rate_probe import measure
rank, limit_s, descriptor = int(sys.argv[1]), float(sys.argv[3]), int(sys.argv[4])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
listening = socket.socket(fileno=descriptor) if rank == 0 else None
try:
    print(json.dumps(asdict(measure(listening, rank, 2, "127.0.0.1", int(sys.argv[2]), "gloo", limit_s, 1 << 20))))
except EngineError as error:
    print(json.dumps(str(error)))
sys.stdout.flush()
os._exit(0)
"""


def measured(ranks: int, limit_s: float) -> list[Any]:
    """Answers of so many of two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = [str(listening.getsockname()[1]), str(limit_s), str(listening.fileno())]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", MEASURES, str(rank), *words],
                stdout=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                cwd=ROOT,
            )
            for rank in range(ranks)
        ]
    return [json.loads(process.communicate(timeout=180)[0].splitlines()[-1]) for process in processes]


def test_two_hosts_measure_rates() -> None:
    for rate in measured(2, 60):
        assert rate["backend"] == "gloo" and rate["nbytes"] == 1 << 20
        assert min(rate["all_reduce"], rate["weights"], rate["ring"]) > 0.001


def test_a_measurement_in_which_a_host_is_missing_ends() -> None:
    began = time.monotonic()
    assert measured(1, 5) == ["rate between hosts: host 1 did not come within 5 s"]
    assert time.monotonic() - began < 60
