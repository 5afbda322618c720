"""The recipes that read files, for real and with all that is in them, a few steps long."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROOT = Path(__file__).parents[2]
SMALL = ("warmup.steps=2", "trainer.steps=2", "trainer.prompts_per_step=8", "metrics.console=true")


@pytest.mark.parametrize(
    ("name", "sets", "rewards", "sources"),
    [
        ("chat", {"plain": 4, "carry": 8}, ("arithmetic", "digits"), ("plain", "carry")),
        pytest.param("math", {"math": 4}, ("math",), (), marks=pytest.mark.release),
    ],
)
def test_a_recipe_of_files_runs(
    name: str, sets: dict[str, int], rewards: tuple[str, ...], sources: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "launch").symlink_to(ROOT / "launch")  # where the recipe's paths start
    fused = "rollout.engine.fused_sampling=true"  # beside held-out sets that are drawn by SGLang
    small = [
        *SMALL,
        fused,
        f"data.files.cache={tmp_path}/cache",
        *(f"evaluation.{held_out}.prompts=16" for held_out in sets),
    ]
    done = subprocess.run(
        [warm_python(), "-m", "hybridflow", "train", f"launch/recipes/{name}.yaml", *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    last_values = {key: value for record in records for key, value in record.items()}
    for held_out, samples in sets.items():
        assert {f"eval/{held_out}/{figure}@{samples}" for figure in ("mean", "pass", "maj")} <= set(last_values)
    assert {f"reward/{reward}/mean" for reward in rewards} <= set(last_values)
    for source in sources:
        assert any(key.startswith(f"data/{source}/") for key in last_values)
