"""Models and weights of engines that leave their devices between their turns, in whole runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hybridflow.metrics.timeline import read_spans
from hybridflow.rundir.file_names import EVENTS, TIMELINE
from tests.support.engine_traces import traced_steps
from tests.support.proves import proves
from tests.support.runs import ROOT, records, rewarded_by_length, run_recipe

PPO = ROOT / "launch/recipes/ppo.yaml"
REMAX = ROOT / "launch/recipes/remax.yaml"
OFFLOAD = ROOT / "launch/recipes/ppo-offload.yaml"

COMPARED = ("loss", "norm", "mean", "accuracy", "variance", "kl", "std")


@proves(
    "qwen3_moe",
    "ep dp padding critic offload checkpoints resharding",
    "ep dp padding optimizer_offload checkpoints resharding",
)
@pytest.mark.long
@pytest.mark.processes
def test_ppo_with_offloaded_models_learns_the_same_bits_and_resumes_with_them(tmp_path: Path) -> None:
    """PPO with every model on the same devices; checkpoints are saved after an evaluation, when the critic is away.

    And with the states of both optimizers in host memory, on their way there while others compute.
    """
    settings = ["evaluation.eval.interval=1", "checkpoint.save_interval=1", "algorithm.critic_warmup_steps=0"]
    settings.append(rewarded_by_length(tmp_path))
    overlap = ("train.optimizer.offload=true", "train.optimizer.overlap_offload=true")
    for recipe, name, *more in (
        (PPO, "stays", "trainer.steps=3"),
        (OFFLOAD, "leaves", "trainer.steps=2", "checkpoint.async_save=false"),
        (OFFLOAD, "leaves", "trainer.steps=3", "resume=auto"),
        (PPO, "overlaps", "trainer.steps=2", *overlap),
        (PPO, "overlaps", "trainer.steps=3", "resume=auto", *overlap),
    ):
        ended = run_recipe(str(recipe), tmp_path / name, *settings, *more)
        assert ended.returncode == 0, ended.stderr
    stays, *others = (records(tmp_path / name / "small", "train", "eval") for name in ("stays", "leaves", "overlaps"))
    for run_records in others:
        for one, other in zip(stays, run_records, strict=True):
            same = [name for name in one if name.endswith(COMPARED) and not name.startswith(("device/", "memory/"))]
            assert len(same) > 10 or one["phase"] == "eval"
            assert {name: one[name] for name in same} == {name: other[name] for name in same}
    digests = [_digests(tmp_path / name / "small") for name in ("stays", "leaves", "overlaps")]
    assert len(digests[0]) == 4 and digests[0] == digests[1] == digests[2]
    leaves = others[0]
    trained = [record for record in leaves if record["phase"] == "train"]
    assert all(record["train/gradient_norm"] > 0 < record["critic/gradient_norm"] for record in trained)
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert all(record["memory/critic_offload_ms"] > 0 < record["memory/critic_onload_ms"] for record in trained)
    assert trained[1]["memory/critic_offloaded_bytes"] > 2 * trained[1]["memory/reference_offloaded_bytes"] > 0
    assert not any(name.startswith("memory/critic_off") for name in stays[0])
    turns = {(span.role, span.method) for span in read_spans(tmp_path / "leaves" / "small" / TIMELINE)}
    assert ("critic", "offload") in turns


def _digests(directory: Path) -> dict[int, list[str]]:
    """Digests of the actor's weights, by their version."""
    events = map(json.loads, (directory / EVENTS).read_text().splitlines())
    return {event["version"]: event["digests"] for event in events if event["event"] == "weights"}


@pytest.mark.processes
@pytest.mark.long
def test_an_engine_that_releases_its_weights_serves_the_same_policy(tmp_path: Path) -> None:
    """Two pipeline stages under one engine, whose weights are away whenever a model computes.

    ReMax generates its baselines after the reference has begun to compute: the engine gets the same version again.
    """
    settings = [
        "train.layout={pp: 2}",
        "trainer.steps=2",
        "evaluation.eval.interval=1",
        "algorithm.kl_coef=0.01",
        "rollout.weights.share=false",
        rewarded_by_length(tmp_path),
    ]
    released = [
        "rollout.engine.memory_saver=true",
        "rollout.engine.release_weights=true",
        "rollout.verify_weights=true",
        "trainer.profile={steps: [2], rollout_steps: 3}",
    ]
    endless = ["trainer.profile={steps: [1, 2], rollout_steps: 100000}"]
    for name, more in (("stays", endless), ("leaves", released)):
        ended = run_recipe(str(REMAX), tmp_path / name, *settings, *more)
        assert ended.returncode == 0, ended.stderr
        untraced = "step 2: no trace of the rollout: rollout engine: trace failed: SGLang begins no trace: "
        assert (untraced in ended.stderr) == (name == "stays")  # where the trace of the first step goes on
    stays, leaves = (records(tmp_path / name / "small", "train", "eval") for name in ("stays", "leaves"))
    for one, other in zip(stays, leaves, strict=True):
        same = [name for name in one if name.endswith(COMPARED) and not name.startswith(("device/", "memory/"))]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    trained = [record for record in leaves if record["phase"] == "train"]
    for record in trained:
        assert record["train/gradient_norm"] > 0
        assert record["memory/rollout_offload_ms"] > 0 < record["memory/rollout_onload_ms"]
        assert record["memory/rollout_offloaded_bytes"] > 0 and record["sync/memory_ms"] > 0
        assert record["rollout/baseline_time_ms"] > 0
        assert record["sync/one_sided_bytes"] == record["sync/moved_bytes"] > 0
    spans = read_spans(tmp_path / "leaves" / "small" / TIMELINE)
    served = Counter(span.method for span in spans if span.method.endswith("commit_weights"))
    # At first and after each step; and of each step the version that it began with, before its baselines.
    assert served == {"commit_weights": 1 + len(trained), "recommit_weights": len(trained)}
    profile = tmp_path / "leaves" / "small" / "profile"
    assert sorted(path.name for path in profile.iterdir()) == ["step-2-actor.json.gz", "step-2-rollout"]
    [trace] = (profile / "step-2-rollout").iterdir()
    steps = traced_steps(trace)
    assert len(steps) == 3 and steps[0].startswith("step[EXTEND"), steps
