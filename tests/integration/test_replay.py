"""Steps of runs made again by the command: the same bits on the same layout, close on another, and not if a sample is
another.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.proves import proves
from tests.support.runs import ROOT, records, rewarded_by_length, run_recipe
from tests.support.warm import warm_python

pytestmark = [pytest.mark.processes, pytest.mark.long]

SETTINGS = [
    "trainer.steps=4",
    "evaluation.eval.before_train=false",
    "trainer.export=false",
    "checkpoint.save_interval=2",
]
STREAMED = [
    "rollout.over_sampling=0.25",
    "rollout.sampling.max_new_tokens=24",
    "rollout.sampling.ignore_eos=true",
    "rollout.engine.max_running_requests=24",  # fewer than are under way, so that some wait for others
    "data.arithmetic.train_size=64",
]


def trained(recipe: str, directory: Path, *overrides: str) -> Path:
    """The directory of a run."""
    done = run_recipe(recipe, directory, *SETTINGS, *overrides, rewarded_by_length(directory))
    assert done.returncode == 0, done.stderr
    return directory / "small"


def replayed(run: Path, step: int, *overrides: str) -> tuple[int, list[str], dict[str, Any]]:
    """Exit code, the lines on stdout, and what the replay has written down."""
    arguments = ["-m", "hybridflow", "replay", str(run), "--step", str(step), *overrides]
    done = subprocess.run(
        [warm_python(), *arguments], capture_output=True, text=True, timeout=400, cwd=ROOT, check=False
    )
    result = run.with_name(f"{run.name}.replay-{step}") / "replay.json"
    assert result.exists(), (done.returncode, done.stdout, done.stderr)
    return done.returncode, done.stdout.splitlines(), json.loads(result.read_text())


def files(directory: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of four steps of two updates each, with a reference policy, and checkpoints after the second and the last.

    Updates replay the engine's routes, and those of the warm-up the routers'.
    """
    recipe = str(ROOT / "launch/recipes/routing-replay.yaml")
    return trained(recipe, tmp_path_factory.mktemp("run"), "algorithm.kl_coef=0.01")


@proves("qwen3_moe", "ep dp padding routing_replay resharding")
def test_updates_replay_the_routes_of_the_engines(run: Path) -> None:
    """Later updates of a step are of other weights than the engine had."""
    assert len(records(run, "sft")) == 2
    steps = records(run, "train")
    assert len(steps) == 4
    for step in steps:
        assert step["rollout/missing_routes_share"] == step["train/missing_route_share"] == 0
        assert 0 <= step["train/different_route_share"] < 0.1
        assert step["mismatch/logprob_abs_diff_max"] < 1e-3
        assert step["train/gradient_norm"] > 0


def test_on_the_same_layout_all_bits_are_the_same(run: Path) -> None:
    before = files(run)
    code, lines, result = replayed(run, 4)
    assert (code, lines[-1]) == (0, "replay: step 4: the same bits"), lines
    assert result["base"] == 2 and list(result["steps"]) == ["3", "4"]
    assert all(step["digests"] and step["metrics"]["differing"] == [] for step in result["steps"].values())
    tensors = result["tensors"]["actor"]
    assert tensors["differing"] == [] and tensors["tensors"] > 100
    names = {"train/loss", "train/gradient_norm", "train/reference_kl", "reward/mean", "rollout/staleness_mean"}
    made = records(run.with_name("small.replay-4"), "train")
    assert names <= made[-1].keys() and result["steps"]["4"]["metrics"]["compared"] > len(names)
    assert made[-1]["rollout/missing_routes_share"] == 0 < made[-1]["rollout/routes_mb"]
    assert files(run) == before  # nothing in the run's directory was touched
    assert not list(run.with_name("small.replay-4").glob("checkpoints/step-*"))


def test_on_another_layout_it_is_within_the_tolerance(run: Path) -> None:
    code, lines, result = replayed(run, 4, "train.layout={ep: 1, tp: 2}")
    assert code == 0 and lines[-1].startswith("replay: step 4: not the same bits, but within the tolerance"), lines
    assert result["verdict"] == "close" and result["changed"] == ["train.layout.tp=2", "train.layout.ep=1"]
    tensors = result["tensors"]["actor"]
    assert tensors["differing"] and 0 < tensors["of_change"] < 1e-3
    assert all(step["digests"] is None for step in result["steps"].values())


def test_another_reward_of_one_sample_is_a_difference(run: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "small"))
    path = copied / "samples/step-00000003.parquet"
    table = pq.read_table(path)
    rewards = table["reward"].to_pylist()
    rewards[5] += 0.25
    column = table.column_names.index("reward")
    pq.write_table(table.set_column(column, table.schema.field("reward"), pa.array(rewards, pa.float32())), path)
    code, lines, result = replayed(copied, 3)
    assert code == 3 and "replay: step 3: different, beyond the tolerance" in lines[-1], lines
    step = result["steps"]["3"]
    assert step["digests"] is False and "reward/mean" in step["metrics"]["outside"]


@pytest.mark.release
def test_a_step_of_a_stream_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    run = trained(str(ROOT / "launch/recipes/stream.yaml"), tmp_path, *STREAMED)
    assert max(record["stream/staleness_max"] for record in records(run, "train")) > 0
    code, lines, result = replayed(run, 4)
    assert (code, lines[-1]) == (0, "replay: step 4: the same bits"), lines
    assert all(step["digests"] for step in result["steps"].values())
    metrics = result["steps"]["4"]["metrics"]
    assert metrics["compared"] > 20 and metrics["differing"] == []
    assert "correction/effective_samples" in records(run.with_name("small.replay-4"), "train")[-1]
