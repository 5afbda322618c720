"""Megatron-Core on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.processes
def test_packages_for_gpus_that_are_installed_are_not_used(tmp_path: Path) -> None:
    for package in ("transformer_engine", "apex"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise SystemExit('{package} was imported')\n")
    program = (
        "from engine3d.platform.cpu.megatron import answer_for_cuda\n"
        "answer_for_cuda()\n"
        "from megatron.core.extensions.transformer_engine import HAVE_TE\n"
        "assert not HAVE_TE\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
