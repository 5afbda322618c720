"""`hybridflow agent`."""

from __future__ import annotations

import subprocess
import sys


def test_an_agent_is_there_before_what_takes_seconds_to_import() -> None:
    # With 512 hosts on one file system these seconds are minutes.
    program = (
        "import sys, hybridflow.cli.main, hybridflow.cli.agent\n"
        "found = {'torch', 'ray', 'sglang', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
