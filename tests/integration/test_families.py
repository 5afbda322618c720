"""Runs of GRPO with models of each family: the engine serves the model that is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.data.tasks import ARITHMETIC_CHARACTERS
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.metrics import names as metrics
from tests.support.runs import DEMO, records, rewarded_by_length, run_recipe
from tests.support.tiny_families import CONFIGS, make

LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"tp": 2},
    "mistral": {"pp": 2},
    "qwen2_moe": {"tp": 2, "ep": 2},
    "mixtral": {"ep": 2},
    "glm4_moe": {"tp": 2, "ep": 2},
    "minimax_m2": {"tp": 2, "ep": 2},
    "gpt_oss": {"tp": 2, "ep": 2},
    "qwen3_next": {"tp": 2, "ep": 2},
    "qwen3_5_moe": {"tp": 2, "ep": 2},
    "qwen3_5-tied": {"tp": 2},
}
SHORTER = ("gpt_oss", "qwen3_next", "qwen3_5_moe")
"""Two of a different attention, and one next to a vision tower. The transfer to an engine of the others has tests of
its own."""


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.release] * (name not in SHORTER)) for name in LAYOUTS]
)
def test_a_run_draws_from_the_weights_that_it_trains(name: str, tmp_path: Path) -> None:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    settings = [f"train.layout={json.dumps(LAYOUTS[name])}"]
    if "text_config" in CONFIGS[name]:
        make(name, tmp_path / "model", changes=ends)
        make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path / "model")
        settings += ["model.create=null", f"model.path={tmp_path / 'model'}"]
    else:
        settings.append(f"model.create.config={json.dumps(CONFIGS[name] | ends)}")
    settings += ["warmup=null", "trainer.steps=2", "rollout.verify_weights=true", "checkpoint.save_interval=2"]
    done = run_recipe(DEMO, tmp_path, *settings, rewarded_by_length(tmp_path))
    assert done.returncode == 0, done.stderr
    train = records(tmp_path / "small", "train")
    assert [record["step"] for record in train] == [1, 2]
    for record in train:
        # The engine's log-probs are those of the model that learns.
        assert record[metrics.MISMATCH_LOGPROB_MAX] < 1e-3
        assert record[metrics.TRAIN_GRADIENT_NORM] > 0
