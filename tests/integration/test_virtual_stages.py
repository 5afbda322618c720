"""A run on a pipeline of virtual stages, each of them on context-parallel ranks, with routing replay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hybridflow.metrics import names as metrics
from tests.support.proves import proves
from tests.support.runs import DEMO, records, rewarded_by_length, run_recipe

FOUR_RANKS = str(Path(DEMO).parent / "placement/four-ranks.yaml")


@proves("qwen3_moe", "cp ep pp vpp stages packing routing_replay resharding")
@pytest.mark.processes
@pytest.mark.release
def test_a_run_on_virtual_stages_draws_from_the_weights_that_it_trains(tmp_path: Path) -> None:
    settings = ["trainer.steps=2", "rollout.verify_weights=true", "train.layout.stages=[1,1,1,1]"]
    settings += ["train.micro_batch_tokens=8", "checkpoint.save_interval=2"]
    done = run_recipe(FOUR_RANKS, tmp_path, *settings, rewarded_by_length(tmp_path))
    assert done.returncode == 0, done.stderr
    train = records(tmp_path / "small", "train")
    assert [record["step"] for record in train] == [1, 2]
    for record in train:
        # The engine's log-probs are those of the model that learns.
        assert record[metrics.MISMATCH_LOGPROB_MAX] < 1e-3
        # Groups of two micro-batches pass through two chunks of two stages.
        micro_batches = 1 / (2 * record["train/pipeline_bubble"])
        assert math.isclose(micro_batches / 2, round(micro_batches / 2)) and micro_batches > 2
        assert 0 < record["train/split_share"] <= 1
        assert record["train/missing_route_share"] == 0
