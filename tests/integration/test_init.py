"""Train what `hybridflow init` writes, as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.runs import records
from tests.support.warm import warm_python


@pytest.mark.long
@pytest.mark.processes
def test_what_was_written_is_checked_and_trained(tmp_path: Path) -> None:
    few = ["warmup.steps=2", "trainer.steps=2", "trainer.prompts_per_step=4"]
    for words in (["init", "new"], ["check", "new/recipe.yaml"], ["train", "new/recipe.yaml", *few]):
        done = subprocess.run(
            [warm_python(), "-m", "hybridflow", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "new"
    assert [record["step"] for record in records(run, "train")] == [1, 2]
    assert (run / "model" / "config.json").is_file() and (run / "checkpoints" / "step-00000002").is_dir()
