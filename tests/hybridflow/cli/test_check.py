"""`hybridflow doctor` on one host; several hosts are in tests/integration/hosts/test_doctor.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes
DEMO = "launch/recipes/demo.yaml"


@pytest.mark.parametrize(
    ("overrides", "code", "errors"),
    [
        ([], 0, []),
        (
            ["data.arithmetic.train_size=0"],
            2,
            ["hybridflow: override data.arithmetic.train_size=0: ", "hybridflow: the run cannot start"],
        ),
    ],
)
def test_the_last_line_says_whether_the_run_can_start(
    tmp_path: Path, overrides: list[str], code: int, errors: list[str]
) -> None:
    words = ["doctor", DEMO, f"run_dir={tmp_path}", *overrides]
    done = subprocess.run(
        [warm_python(), "-m", "hybridflow", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    said, wrong = done.stdout.splitlines(), done.stderr.splitlines()
    assert said[0].startswith("sandbox: ")
    assert code or said[1].startswith("1 host alike in all ")
    assert said[2:] == ([] if code else [f"{DEMO}: nothing wrong found", "the run can start"])
    assert len(wrong) == len(errors) and all(line.startswith(error) for line, error in zip(wrong, errors, strict=True))
