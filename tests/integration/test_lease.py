"""A run whose trainer leases a device to an engine while it waits: what that engine had goes on at the other."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks.kill_harness import Kill, KilledRun
from tests.support.runs import ROOT, SMALL, records, rewarded_by_length, run_recipe, stored_samples
from tests.support.warm import warm_python

RECIPE = str(ROOT / "launch/recipes/stream-lease.yaml")
STEPS, GROUPS, SAMPLES, TOKENS = 5, 8, 4, 48
SETTINGS = [
    f"trainer.steps={STEPS}",
    "evaluation.eval.interval=2",
    "trainer.export=false",
    f"rollout.sampling.max_new_tokens={TOKENS}",
    "rollout.sampling.ignore_eos=true",
    "rollout.engine.max_running_requests=3",  # so that some are under way whenever a step has its groups
    "rollout.engine.memory_saver=true",  # the engine that is leased gives its cache back, and the other must not
    "rollout.engine.deterministic=false",
    "rollout.engine.fused_sampling=true",
    "rollout.verify_weights=true",
]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.release),
        ["rollout.weights.rolling=true", "rollout.stream.on_new_weights=wait"],
    ],
)
def test_a_device_of_the_actor_generates_while_it_waits(tmp_path: Path, more: list[str]) -> None:
    done = run_recipe(RECIPE, tmp_path, *SETTINGS, *more, rewarded_by_length(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "rollout.lease: engines 0 of 2 generate while a step waits" in done.stdout
    run = tmp_path / "small"
    train = records(run, "train")
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert sum(record["stream/reclaimed_requests"] for record in train) > 0
    leased = [record for record in train if record["stream/leased_ms"] > 0]
    assert len(leased) >= 2 and all(
        record["stream/lease_start_ms"] > 0 < record["stream/reclaim_ms"] for record in leased
    )
    assert all(0 <= record["stream/engines_busy_share"] <= 1 for record in train)

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    reclaimed = [sample for event in events if event["event"] == "reclaimed" for sample in event["samples"]]
    assert {engine for event in events if event["event"] == "leased" for engine in event["engines"]} == {0}
    assert {engine for event in events if event["event"] == "reclaimed" for engine in event["engines"]} == {0}
    assert reclaimed

    tables = stored_samples(run)
    learned = [sample for table in tables for sample in table["sample_id"]]
    assert len(learned) == len(set(learned)) == STEPS * GROUPS * SAMPLES
    groups = {group for table in tables for group in table["group_id"]}
    assert len(groups) == STEPS * GROUPS
    # Each engine has drawn some, and what was reclaimed is among what was learned from, whole.
    assert {engine for table in tables for engine in table["engine"]} == {0, 1}
    assert set(reclaimed) & set(learned)
    assert {len(tokens) for table in tables for tokens in table["response_tokens"]} == {TOKENS}


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.release
def test_a_run_that_ends_while_a_device_is_leased_saves_and_resumes(tmp_path: Path) -> None:
    stop = ["checkpoint={save_interval: 1000, on_stop_s: 60}", "rollout.verify_weights=false"]
    recipe = [RECIPE, *SMALL, *SETTINGS, *stop, rewarded_by_length(tmp_path)]
    run = KilledRun(tmp_path / "run", recipe, interpreter=warm_python())
    outcome = run.run(Kill("driver", "rollout", 2, 0.1, signal.SIGTERM))
    assert outcome.killed and outcome.exit_code == 75 and not outcome.left_over, run.output
    buffered = json.loads(next(run.run_directory.glob("checkpoints/step-*/driver.json")).read_text())["groups"]
    assert buffered["begun"]  # with what the engine that was leased had
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    tables = stored_samples(run.run_directory)
    learned = [sample for table in tables for sample in table["sample_id"]]
    assert len(learned) == len(set(learned)) == STEPS * GROUPS * SAMPLES
    assert {group for table in tables for group in table["group_id"]} == set(range(STEPS * GROUPS))
