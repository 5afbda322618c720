"""The scripts and recipes in examples/ run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]


def test_every_example_is_in_the_list() -> None:
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", (ROOT / "examples/README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{root}/examples/dataflow.py"], r"^\[\{'total': \[0, 90\]\}, \{'total': \[2, 380\]\}\]$"),
        (["{root}/examples/ppo_trainer_loop.py"], r"^step 2: reward -?\d\.\d{3}, \d+ long responses$"),
        (
            [
                *("-m", "hybridflow", "train", "{root}/examples/own_reward.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=8", "trainer.eval_before_train=false"),
                *("trainer.eval_prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^train 1/1 ",
        ),
        (
            [
                *("-m", "hybridflow", "train", "{root}/examples/mathematics.yaml", "warmup.steps=1"),
                *("trainer.steps=1", "trainer.prompts_per_step=8", "trainer.eval_before_train=false"),
                *("trainer.eval_prompts=16", "trainer.export=false", "placement.actor=cpu:0", "train.layout.ep=1"),
            ],
            r"^train 1/1 ",
        ),
    ],
    ids=["dataflow", "ppo_trainer_loop", "own_reward", "mathematics"],
)
def test_an_example_runs(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # where the recipe's path of its function starts
    done = subprocess.run(
        [warm_python(), *(word.format(root=ROOT) for word in words)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout
