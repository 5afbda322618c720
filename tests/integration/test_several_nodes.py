"""Behaviour that differs where ranks are on several nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_only_the_rows_of_its_part_go_to_another_node() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.two_nodes"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    exchanged = json.loads(next(line for line in output.splitlines() if line.startswith("{")))  # Ray prints there too
    assert exchanged["nodes"] == 2
    assert exchanged["sample_ids"] == list(range(40, 50)) and exchanged["right"]
    near, far = exchanged["parts"]
    assert sorted(near + far) == list(range(10))
    assert exchanged["rows"] == [10, len(far)]  # on the same node all is read in place; to the other go its rows alone
