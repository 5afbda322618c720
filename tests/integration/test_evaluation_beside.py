"""Evaluation beside training: what it goes together with, and what becomes of a failure. See also `test_resume`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks.kill_harness import Kill, KilledRun
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.timeline import read_spans, step_ends
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import DEMO, ROOT, SMALL, records, rewarded_by_length
from tests.support.warm import warm_python

BESIDE = "trainer.async_evaluation=true"
RECIPE = [
    "trainer.steps=3",
    "evaluation.eval.interval=1",
    "evaluation.beyond.interval=1",
    "checkpoint.save_interval=1",
    "checkpoint.keep_best=null",
    "evaluation.sums.prompts=12",
    "evaluation.beyond.prompts=5",
    "placement.rollout=cpu:2",
]


def a_run(directory: Path, *overrides: str) -> KilledRun:
    recipe = [str(ROOT / "examples/evaluation.yaml"), *SMALL, *RECIPE, rewarded_by_length(directory.parent)]
    return KilledRun(directory, [*recipe, *overrides], interpreter=warm_python())


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.release
def test_with_rollout_one_step_ahead_results_are_those_of_waiting_evaluations(tmp_path: Path) -> None:
    ahead = "trainer.max_staleness=1"
    runs = waiting, beside = a_run(tmp_path / "waiting", ahead), a_run(tmp_path / "beside", ahead, BESIDE)
    for run in runs:
        assert run.run().exit_code == 0, run.output
    results = [sorted(run.records(), key=lambda record: (record["phase"], record["step"])) for run in runs]
    assert results[0] == results[1] and beside.model() == waiting.model()
    events = [(run.run_directory / "events.jsonl").read_text() for run in runs]
    assert events[0] == events[1]
    states = [json.loads((run.run_directory / "checkpoints/step-00000003/driver.json").read_text()) for run in runs]
    assert states[0].pop("run") != states[1].pop("run")
    assert states[0] == states[1]


def a_function(directory: Path, body: str) -> str:
    """A setting: rewards of the set `sums` by a function of this body, whose failure ends the run."""
    directory.mkdir(exist_ok=True)
    (directory / "own.py").write_text(f"import time\n\n\ndef score(generated_texts):\n    {body}\n")
    return f'evaluation.sums.reward.functions=[{{name: own, path: "{directory}/own.py:score", on_failure: stop}}]'


@pytest.mark.long
@pytest.mark.processes
def test_a_reward_that_fails_beside_a_step_ends_the_run_before_weights_change(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", BESIDE, a_function(tmp_path / "rewards", "raise ValueError('no judge')"))
    outcome = run.run()
    assert outcome.exit_code == 1 and not outcome.left_over, run.output
    errors = [line for line in run.output.splitlines() if line.startswith("hybridflow: ")]
    assert "own" in errors[0] and "no judge" in errors[0], errors
    spans = read_spans(run.run_directory / "timeline.json")
    assert len(step_ends(spans)) == 1 and any(span.method == "update" for span in spans)
    assert not records(run.run_directory, "train", "eval")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.release
def test_an_engine_that_is_lost_beside_a_step_ends_the_run_as_one_that_is_waited_for(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", BESIDE, "evaluation.sums.samples=200")
    outcome = run.run(Kill("engine", "update", 1, 0.3))
    assert outcome.killed and outcome.exit_code == 1 and not outcome.left_over, run.output
    errors = [line for line in run.output.splitlines() if line.startswith("hybridflow: ")]
    assert errors[0].startswith("hybridflow: rollout rank 0, generate: "), errors
    assert not records(run.run_directory, "train", "eval")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.release
def test_a_signal_ends_a_run_that_waits_for_an_evaluation(tmp_path: Path) -> None:
    slow = a_function(tmp_path / "rewards", "time.sleep(1000)")
    run = a_run(tmp_path / "run", BESIDE, slow, "limits.quiet_s=2", "limits.stop_s=60")
    outcome = run.run(Kill("driver", "eval", 1, 5.0, signal.SIGTERM))
    assert outcome.killed and outcome.exit_code == 143 and not outcome.left_over, run.output
    lines = run.output.splitlines()
    assert "step 1: the evaluation of step 0 is not over; the new weights wait for it" in lines
    assert "hybridflow: terminated" in lines


def test_engines_on_devices_of_a_model_are_refused(tmp_path: Path) -> None:
    common = [f"run_dir={tmp_path}", *SMALL, BESIDE]
    expected = (
        r"trainer\.async_evaluation=true with placement\.rollout and placement\.actor both on cpu:0 of node 0, "
        r"expected rollout on devices of its own, or trainer\.async_evaluation=false"
    )
    with pytest.raises(SettingsError, match=expected):
        check_recipe(load_recipe(DEMO, common))
    check_recipe(load_recipe(DEMO, [*common, "placement.rollout=cpu:2"]))
