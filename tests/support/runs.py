"""Whole runs of a small recipe by the command, and what to compare of two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]

DEMO = str(ROOT / "launch/recipes/demo.yaml")
SMALL = [
    "name=small",
    "warmup.steps=2",
    "trainer.prompts_per_step=8",
    "evaluation.eval.prompts=16",
    "evaluation.eval.samples=1",
    "rollout.samples_per_prompt=4",
    "rollout.engine.deterministic=true",
    "data.arithmetic.train_size=20",
    "checkpoint.save_interval=null",
]


def rewarded_by_length(directory: Path) -> str:
    """Return a setting: a reward that differs between samples from the first step on, unlike that of the task."""
    path = directory / "length.py"
    path.write_text("def score(generated_texts):\n    return [len(text) / 4 for text in generated_texts]\n")
    return f'reward.functions=[{{name: length, path: "{path}:score"}}]'


def command(directory: Path, *overrides: str, recipe: str = DEMO) -> list[str]:
    arguments = [recipe, f"run_dir={directory}", *SMALL, *overrides]
    return [sys.executable, "-m", "hybridflow", "train", *arguments]


def run(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_recipe(DEMO, directory, *overrides)


def run_recipe(recipe: str, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), *command(directory, *overrides, recipe=recipe)[1:]],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        check=False,
    )


def records(directory: Path, *phases: str) -> list[dict[str, Any]]:
    """Read the records of `<directory>/metrics.jsonl`, of some phases or of all."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["phase"] in phases or not phases]


def stored_samples(directory: Path) -> list[dict[str, list[Any]]]:
    """Read the columns of each step's file in a run's sample store, in order."""
    return [pq.read_table(path).to_pydict() for path in sorted((directory / "samples").iterdir())]
