"""Measurements of rollout modes on GPUs."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.stream_gpu import BATCH, WAYS, kinds, measured, settings, table, write_prompts
from hybridflow.cluster.devices.device_map import Node
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import ROOT

RECIPE = ROOT / "launch/recipes/h200-2x2-one-step-apart.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_recipe(way: str, tmp_path: Path) -> None:
    write_prompts(tmp_path / "train.jsonl", 32)
    write_prompts(tmp_path / "eval.jsonl", 16)
    options = argparse.Namespace(
        directory=tmp_path,
        steps=8,
        prompts=4,
        samples=2,
        task="math",
        longest=1000,
        overrides=["train.layout.ep=1", "placement.actor=cuda:0", "placement.rollout=cuda:1"],
    )
    recipe = load_recipe(RECIPE, settings(way, options))
    check_recipe(recipe, [Node("node 0", gpus=2, cpu_slots=0)], must_fit=False)
    assert (recipe.rollout.stream is None) == (way in (BATCH, "ahead"))
    assert recipe.trainer.max_staleness == WAYS[way][1]


def test_the_length_of_a_prompt_says_how_long_its_responses_are(tmp_path: Path) -> None:
    lengths = kinds("math", 3800)
    assert len(lengths) == 16 and lengths[-1][1] == 3800
    assert all(before < after for before, after in pairwise(tokens for _, tokens in lengths))
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, 32)
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert [len(prompt) for prompt in prompts] == 2 * [characters for characters, _ in lengths]
    assert len(set(prompts)) == 32


def test_a_way_is_compared_with_the_batch_call() -> None:
    records = [
        {"train/step_time_ms": 500.0, "rollout/response_length_mean": 20.0},
        {"train/step_time_ms": 1500.0, "rollout/response_length_mean": 30.0},
    ]
    batch = measured(records, 8)
    assert batch == {"tokens_per_s": 200.0, "step_s": 1.0}
    shares = {"stream/trainer_wait_share": 0.25, "stream/engines_busy_share": 0.75}
    stream = measured([records[0] | shares], 8)
    *_, first, second = table({BATCH: batch, "stream-1": stream})
    assert first == "| batch | 200 | 1.00 | 1.00 |  |  |"
    assert second == "| stream-1 | 320 | 1.60 | 0.50 | 75 % | 25 % |"
    assert " |  | " in list(table({"stream-1": stream}))[-1]
