"""The shell scripts, as shellcheck sees them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), *sorted((ROOT / "launch").glob("*.sbatch")), ROOT / ".ci/run"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_there_are_scripts() -> None:
    assert {"setup.sh", "ssh.sh", "slurm.sbatch", "run"} <= {script.name for script in SCRIPTS}
    assert all(script.stat().st_mode & 0o111 for script in SCRIPTS if script.suffix != ".sbatch")
