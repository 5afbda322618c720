"""Runs that lose an engine of a stream: the others go on, and it comes back with the weights that they serve."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_harness import Kill, KilledRun
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import ROOT, SMALL, records, rewarded_by_length, stored_samples
from tests.support.warm import warm_python

RECIPE = str(ROOT / "launch/recipes/stream.yaml")
STEPS, GROUPS, SAMPLES, TOKENS = 8, 8, 4, 48
SETTINGS = [
    f"trainer.steps={STEPS}",
    "evaluation.eval.interval=4",
    "trainer.export=false",
    f"rollout.sampling.max_new_tokens={TOKENS}",
    "rollout.sampling.ignore_eos=true",
    "rollout.engine.max_running_requests=3",
    "rollout.stream.engine_restarts=1",
    "rollout.verify_weights=true",
    "checkpoint.save_interval=1",
]


def _events(run: KilledRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_directory / "events.jsonl").read_text().splitlines()]


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("engines", "more"),
    [
        pytest.param(2, ["rollout.weights.transport=collective"], marks=pytest.mark.release),
        (1, ["rollout.stream.on_new_weights=resend"]),  # nobody generates until it is back
        (2, ["train.lora={rank: 4, targets: [q_proj, o_proj], engine: adapter}", "rollout.weights.rolling=true"]),
    ],
)
def test_a_run_goes_on_while_an_engine_is_started_again(engines: int, more: list[str], tmp_path: Path) -> None:
    recipe = [RECIPE, *SMALL, *SETTINGS, *more, f"placement.rollout=cpu:2-{engines + 1}", rewarded_by_length(tmp_path)]
    run = KilledRun(tmp_path / "run", recipe, interpreter=warm_python())
    outcome = run.run(Kill("engine", "rollout", 2, 0.0), limit_s=600.0)
    assert outcome.killed and outcome.exit_code == 0 and not outcome.left_over, run.output
    assert "is lost and is started again, the others continue: " in run.output
    assert "serves again, weights version " in run.output

    train = records(run.run_directory, "train")
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert sum(record["stream/lost_engines"] for record in train) == 1
    assert len(records(run.run_directory, "eval")) == 3
    events = _events(run)
    (lost,) = [event for event in events if event["event"] == "lost_engine"]
    at = events.index(lost)
    back = next(event for event in events[at:] if event["event"] == "serves" and lost["engine"] in event["engines"])
    sent = [(event["version"], event["engines"]) for event in events[events.index(back) :] if event["event"] == "sent"]
    assert any(lost["engine"] in to for _, to in sent)
    assert all(version >= back["version"] for version, to in sent if lost["engine"] in to)

    tables = stored_samples(run.run_directory)
    samples = [sample for table in tables for sample in table["sample_id"]]
    assert len(samples) == len(set(samples)) == STEPS * GROUPS * SAMPLES
    groups = Counter(group for table in tables for group in table["group_id"])
    assert set(groups) == set(range(STEPS * GROUPS)) and set(groups.values()) == {SAMPLES}
    assert {len(tokens) for table in tables for tokens in table["response_tokens"]} == {TOKENS}
    assert set(lost["samples"]) <= set(samples)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["rollout.lease=true", "placement.rollout=cpu:1-2"],
            r"lease=true with rollout\.stream\.engine_restarts=1, which",
        ),
        (["rollout.stream.engine_restarts=-1"], r"engine_restarts"),
    ],
)
def test_what_restarts_do_not_go_with_is_refused(settings: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=line):
        check_recipe(load_recipe(RECIPE, [*SMALL, *SETTINGS, f"run_dir={tmp_path}", *settings]))
