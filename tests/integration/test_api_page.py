"""The examples of docs/api.md run, as one script."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from hybridflow.config.recipe import load_recipe
from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "launch/recipes/demo.yaml"

PROBE = """
import torch
from hybridflow.trainer.step import TrainerStep

learned = []
update = TrainerStep.update

def watched(step, experience, **others):
    learned.append((experience.batch.fetch(), experience.whiten, experience.batch))
    return update(step, experience, **others)

TrainerStep.update = watched
"""
MODULES = """
import sys
print("the driver has imported", [name for name in ("megatron.core", "sglang") if name in sys.modules])
"""
CHECKS = """
(first, first_whiten, _), (second, second_whiten, _), (third, _, _) = learned
assert len(first) == 8 and len(second) == 6 and len(third) == 8, "each update learns from what it was given"
assert torch.equal(second.rewards, rollouts_of_1.rewards - 0.1 * rollouts_of_1.response_lengths)
assert second.sample_ids.tolist() == rollouts_of_1.sample_ids.tolist()
assert not torch.allclose(second.advantages, second.flat(rollouts_of_1.advantages)), "estimated anew"
assert first_whiten is not None and second_whiten.count == int(second.response_mask.sum())
assert [int(each.policy_versions[0]) for each, _, _ in learned] == [1, 2, 3]
print("learned from what it was given")
"""


def page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)


@pytest.mark.long
@pytest.mark.processes
def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    """Two runs and a graph, one after another, as one script; nothing is left of them."""
    from hybridflow.config.initial_model import create_model

    create_model(load_recipe(DEMO).model, tmp_path / "my-model", seed=0)
    blocks = page()
    own_loop = next(index for index, block in enumerate(blocks) if "with PPOTrainer(" in block)
    kept = "rollouts = rollouts.replace("
    assert kept in blocks[own_loop]
    blocks[own_loop] = blocks[own_loop].replace(kept, f"rollouts_of_1 = rollouts; {kept}")
    script = tmp_path / "page.py"
    sections = [*blocks[:own_loop], PROBE, blocks[own_loop], CHECKS, *blocks[own_loop + 1 :], MODULES]
    script.write_text("\n".join(sections))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_API_MARK": str(tmp_path)}
    done = subprocess.run(
        [warm_python(), str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in {tmp_path}/runs/grpo/model" in done.stdout
    assert (tmp_path / "runs/grpo/model/model.safetensors").is_file()
    said = re.findall(r"^mean reward of 16 training prompts: .*, step 0 -> step 2$", done.stdout, re.MULTILINE)
    assert len(said) == 2 and said[0] == said[1]  # by the run, and by the script
    assert len(re.findall(r"^step \d: reward -?\d\.\d{3}$", done.stdout, re.MULTILINE)) == 3
    assert "learned from what it was given" in done.stdout
    assert "the driver has imported []" in done.stdout
    assert "[{'total': [2, 110]}, {'total': [6, 420]}]" in done.stdout
    assert not left_over(tmp_path)


def left_over(mark: Path) -> list[int]:
    """Living processes of the script."""
    leftovers = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_API_MARK") == str(mark) and process.status() != psutil.STATUS_ZOMBIE:
                leftovers.append(process.pid)
        except psutil.Error:
            continue
    return leftovers
