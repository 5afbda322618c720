"""A run that is killed and resumed is the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kill_harness import Comparison, Kill, KilledRun, compare
from hybridflow.checkpoint.set_results import value_of
from hybridflow.metrics.timeline import read_spans, step_ends
from hybridflow.rundir.samples.evaluation_texts import read_texts, steps_with_texts, text_file
from tests.support.proves import proves
from tests.support.runs import ROOT, SMALL, records, rewarded_by_length, run_recipe
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes
_OF_A_KILL = ("or both were killed", "or ended without a word", "first failure")
"""Ends of lines that the watchdog and the card of a failure say of a driver that was killed."""

# An epoch of the training prompts ends within step 3, evaluations lie on both sides of the kill, there is a reference,
# and the second update of a step needs the log-probs of the policy before the first.
RECIPE = [
    "trainer.steps=5",
    "evaluation.eval.interval=2",
    "trainer.epochs=2",
    "checkpoint={save_interval: 2, keep_last_k: 2, keep_best: {metric: eval/sums/reward_mean, mode: min}}",
    "evaluation.sums.interval=2",
    "evaluation.sums.prompts=12",
    "evaluation.beyond.interval=3",
    "evaluation.beyond.prompts=5",
    "evaluation.beyond.texts=2",
    "algorithm.kl_coef=0.01",
    "train.optimizer.warmup_steps=3",
]
BESIDE = ["trainer.async_evaluation=true", "placement.rollout=cpu:2"]


EVALUATED = str(ROOT / "examples/evaluation.yaml")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*RECIPE, rewarded_by_length(tmp_path_factory.mktemp("rewards"))]


@pytest.fixture(scope="module")
def uninterrupted(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """A run that was never interrupted."""
    run = a_run(tmp_path_factory.mktemp("whole"), recipe)
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert not outcome.left_over
    return run


@pytest.fixture(scope="module")
def beside(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """The same with asynchronous evaluations."""
    run = a_run(tmp_path_factory.mktemp("beside"), [*recipe, *BESIDE])
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert not outcome.left_over
    return run


def a_run(directory: Path, recipe: list[str]) -> KilledRun:
    return KilledRun(directory, [EVALUATED, *SMALL, *recipe], interpreter=warm_python())


def driver_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "driver.json").read_text())
    return state


def events(directory: Path) -> list[dict[str, object]]:
    """All but that the run was resumed."""
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] != "resumed"]


def test_what_a_run_saves(beside: KilledRun) -> None:
    directory = beside.run_directory
    kept = sorted(path.name for path in (directory / "checkpoints").glob("step-*"))
    assert kept == ["step-00000000", "step-00000004", "step-00000005"]  # the best one, and the last two
    saved = records(directory, "checkpoint")
    assert [record["step"] for record in saved] == [0, 2, 4, 5]
    for record in saved:
        assert record["checkpoint/stall_ms"] > 0 and record["checkpoint/complete_after_sec"] > 0
        assert record["checkpoint/written_bytes"] > 1e6
    measured = {
        record["step"]: record["eval/sums/reward_mean"]
        for record in records(directory, "eval")
        if "eval/sums/reward_mean" in record
    }
    assert min(measured, key=measured.__getitem__) == 0 and measured.keys() == {0, 2, 4, 5}
    first, *others = saved
    assert "checkpoint/best_step" not in first  # its evaluation is not over
    assert all(record["checkpoint/best_step"] == 0 for record in others)
    assert all(record["checkpoint/best_value"] == measured[0] for record in others)
    assert all(record["train/gradient_norm"] > 0.01 for record in records(directory, "train"))
    phase = json.loads((directory / "phase.json").read_text())
    assert (phase["step"], phase["phase"]) == (5, "end")


def test_named_sets_are_measured_when_it_is_time(beside: KilledRun) -> None:
    directory = beside.run_directory
    evaluations = records(directory, "eval")
    sums = [record for record in evaluations if "eval/sums/mean@4" in record]
    beyond = [record for record in evaluations if "eval/beyond/mean@1" in record]
    default = [record for record in evaluations if "eval/reward_mean" in record]
    assert [[record["step"] for record in selected] for selected in (sums, beyond, default)] == [
        [0, 2, 4, 5],
        [3, 5],
        [0, 2, 4, 5],
    ]
    for record in sums:
        # A response passes with a reward of 1: four characters, which max_new_tokens=4 are.
        rates = [record[f"eval/sums/{name}"] for name in ("pass@1", "pass@2", "pass@4")]
        assert rates[0] == record["eval/sums/mean@4"] and rates == sorted(rates)
        assert (
            record["eval/sums/reward_mean_low"] < record["eval/sums/reward_mean"] < record["eval/sums/reward_mean_high"]
        )
        assert record["eval/sums/samples"] == 48 and record["eval/sums/left_out_samples"] == 0
        assert 0 <= record["eval/sums/maj@4"] <= 1 and record["eval/sums/time_ms"] > 0
    for record in beyond:
        assert "eval/beyond/maj@1" not in record and record["eval/beyond/prompts"] == 5
        assert record["eval/beyond/accuracy"] == record["eval/beyond/pass@1"]  # rewards of its own, 0 or 1
    texts = {name: steps_with_texts(directory / "evaluations")[name] for name in ("sums", "beyond")}
    assert texts == {"sums": [0, 2, 4, 5], "beyond": [3, 5]}
    one = read_texts(text_file(directory / "evaluations", "beyond", 5))
    assert [(text.index, text.prompt, text.answer, text.scored) for text in one] == [
        (0, "50+0=", "50", 1), (2, "52+14=", "66", 1)
    ]  # fmt: skip
    state = driver_state(directory / "checkpoints" / "step-00000005")
    assert state["best"]["step"] == 0 and state["last_measured"]["beyond"]["step"] == 5
    assert beside.output.count("best checkpoint: step 0, eval/sums/reward_mean") == 1
    assert re.search(
        r"\nsums, mean reward of 12 held-out prompts: \S+ \[\S+, \S+\] -> \S+ \[\S+, \S+\], step 0 -> step 5\n",
        beside.output,
    )


def test_a_checkpoint_that_is_evaluated_alone_gives_the_figures_of_the_run(beside: KilledRun, tmp_path: Path) -> None:
    words = ["-m", "hybridflow", "evaluate", str(beside.run_directory), "--checkpoint", "best", "--set", "sums"]
    done = subprocess.run(
        [warm_python(), *words, "--out", str(tmp_path / "alone")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads((tmp_path / "alone" / "evaluation.json").read_text())
    assert evaluated["step"] == 0 and evaluated["sets"].keys() == {"sums"}
    measured = driver_state(beside.run_directory / "checkpoints" / "step-00000005")["first_measured"]["sums"]
    assert measured["statistics"].pop("training_prompts") == 0
    assert evaluated["sets"]["sums"] == measured  # bit for bit: engines are deterministic, and weights are the same
    texts = [
        (directory / "evaluations/sums/step-00000000.jsonl").read_text()
        for directory in (beside.run_directory, tmp_path / "alone")
    ]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 12
    assert re.search(r"^sums +12 +4 +reward_mean +\d\.\d{4} +\S+ to \S+ *$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "alone" / "weights").exists()


@pytest.mark.long
def test_the_model_that_a_run_has_exported_gives_the_figures_of_its_last_step(
    uninterrupted: KilledRun, tmp_path: Path
) -> None:
    words = ["-m", "hybridflow", "evaluate", str(uninterrupted.run_directory / "model"), "--set", "sums"]
    recipe = uninterrupted.run_directory / "recipe.yaml"
    done = subprocess.run(
        [warm_python(), *words, "--recipe", str(recipe), "--out", str(tmp_path / "alone")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads((tmp_path / "alone" / "evaluation.json").read_text())
    measured = driver_state(uninterrupted.run_directory / "checkpoints" / "step-00000005")["last_measured"]["sums"]
    assert measured["step"] == 5 and measured["statistics"].pop("training_prompts") == 0
    assert evaluated["step"] is None and evaluated["sets"]["sums"]["statistics"] == measured["statistics"]


@pytest.mark.long
def test_evaluations_beside_training_change_neither_results_nor_training(
    uninterrupted: KilledRun, beside: KilledRun
) -> None:
    def of_phase(run: KilledRun, phase: str) -> list[dict[str, Any]]:
        selected = [record for record in run.records() if record["phase"] == phase]
        # Where the engine shares no device with the actor, weights go another way.
        return [{name: value for name, value in record.items() if "sync/" not in name} for record in selected]

    for phase in ("sft", "train", "eval"):
        assert of_phase(beside, phase) == of_phase(uninterrupted, phase)
    assert beside.model() == uninterrupted.model()
    directories = beside.run_directory, uninterrupted.run_directory
    assert events(directories[0]) == events(directories[1])  # digests of the weights of each step among them
    for name in ("samples.jsonl", "evaluations/sums/step-00000002.jsonl", "evaluations/beyond/step-00000003.jsonl"):
        texts = [sorted((directory / name).read_text().splitlines()) for directory in directories]
        assert texts[0] == texts[1] and texts[0]
    states = [driver_state(directory / "checkpoints/step-00000005") for directory in directories]
    assert states[0].pop("run") != states[1].pop("run")
    assert states[0] == states[1]
    kept = [sorted(path.name for path in (directory / "checkpoints").glob("step-*")) for directory in directories]
    assert kept[0] == kept[1]  # the best one too
    metric = "eval/sums/reward_mean"
    values = [[value_of(directory / "checkpoints" / name, metric) for name in kept[0]] for directory in directories]
    assert values[0] == values[1] and None not in values[0]
    saved = records(uninterrupted.run_directory, "checkpoint")
    assert [(record["step"], record["checkpoint/best_step"]) for record in saved] == [(0, 0), (2, 0), (4, 0), (5, 0)]


def test_engines_respond_to_held_out_prompts_while_the_models_learn_the_next_step(beside: KilledRun) -> None:
    directory = beside.run_directory
    order = [(record["phase"], record["step"]) for record in records(directory, "train", "eval")]
    assert order == [
        ("train", 1), ("eval", 0), ("train", 2), ("train", 3), ("eval", 2), ("train", 4), ("eval", 3), ("train", 5),
        ("eval", 4), ("eval", 5),
    ]  # fmt: skip
    waits = {record["step"]: record.get("eval/wait_ms") for record in records(directory, "train")}
    assert waits.pop(2) is None and all(waited is not None and waited >= 0 for waited in waits.values())
    spans = read_spans(directory / "timeline.json")
    held_out = []
    for begin, end in pairwise(step_ends(spans)):
        within = [span for span in spans if begin < span.begin < end]
        first, *others = [span for span in within if span.method == "generate"]
        rewarded = min(span.begin for span in within if span.method == "score")
        learned = max(span.end for span in within if span.method == "update")
        assert first.end < rewarded and all(rewarded < span.begin for span in others)
        assert not others or others[0].begin < learned
        held_out.append(len(others))
    assert held_out == [2, 0, 2, 1, 2]  # sets, the data's own among them


@pytest.mark.long
def test_a_run_that_is_killed_beside_an_evaluation_is_the_uninterrupted_one(
    beside: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    run = a_run(tmp_path, [*recipe, *BESIDE, "checkpoint.on_stop_s=60"])
    outcome = run.run(Kill("engine", "update", 3, 0.0))
    assert outcome.killed and outcome.exit_code == 1 and not outcome.left_over, run.output
    assert "\nhybridflow: rollout rank 0, " in run.output
    outcome = run.run(Kill("driver", "update", 4, 0.0, signal.SIGTERM))
    assert outcome.killed and outcome.exit_code == 75 and not outcome.left_over, run.output
    saved = driver_state(run.run_directory / "checkpoints" / "step-00000004")
    assert saved["evaluation_due"] and saved["last_measured"]["beyond"]["step"] == 3
    outcome = run.run(Kill("driver", "update", 5, 0.1))
    assert outcome.killed and outcome.exit_code == -9 and not outcome.left_over, run.output
    outcome = run.run()
    assert outcome.exit_code == 0 and not outcome.left_over, run.output
    assert run.output.count("resume: after step 4, ") == 2
    assert compare(run, beside) == Comparison(identical=True, lost=0, duplicated=0)
    assert events(run.run_directory) == events(beside.run_directory)
    states = [driver_state(killed_run.run_directory / "checkpoints/step-00000005") for killed_run in (beside, run)]
    assert states[0].pop("run") != states[1].pop("run")
    assert states[0] == states[1]


@proves("qwen3_moe", "ep dp padding checkpoints resharding")
@pytest.mark.long
def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_one(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    run = a_run(tmp_path, recipe)
    killed = run.run_directory
    kills: list[Kill] = [
        Kill("driver", "rollout", 4, 0.0),
        Kill("rollout", "update", 4, 0.0),
    ]
    for number, kill in enumerate(kills):
        outcome = run.run(kill)
        assert outcome.killed, run.output
        assert outcome.exit_code == (1 if kill.target == "rollout" else -9), run.output
        assert not outcome.left_over
        assert run.output.count("resume: after step ") == number
    assert f"\nresume: no whole checkpoint in {killed}/checkpoints; starting afresh\n" in run.output
    errors = [line for line in run.output.splitlines() if line.startswith("hybridflow: ")]
    # What the watchdog says of the driver that was killed, and the card of it.
    errors = [line for line in errors if not line.endswith(_OF_A_KILL)]
    assert "rollout" in errors[0], errors
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert not outcome.left_over
    last = run.output[run.output.rindex("\nchecking ") :].splitlines()
    started = [line.split("  ")[-1] for line in last if line.startswith("start ")]
    assert started[:2] == [
        "Ray",
        "starting actor (2 CPU slots), rollout (1 CPU slot), reference (2 CPU slots), reward (1 CPU slot)",
    ]
    assert sorted(started[2:]) == ["actor is ready", "reference is ready", "reward is ready", "rollout is ready"]
    assert [path.name for path in tmp_path.glob("small*")] == ["small"]

    assert compare(run, uninterrupted) == Comparison(identical=True, lost=0, duplicated=0)
    written = [(side.run_directory / "samples.jsonl").read_text() for side in (uninterrupted, run)]
    assert written[0] == written[1] and len(written[0].splitlines()) == 4 * 5
    stored = [
        pq.read_table(side.run_directory / "samples").drop_columns(["began", "ended"]) for side in (uninterrupted, run)
    ]
    assert stored[0].equals(stored[1]) and stored[0]["step"].to_pylist() == [1 + row // 32 for row in range(5 * 32)]
    decided = [
        events(side.run_directory) for side in (uninterrupted, run)
    ]  # digests of the weights of each step among them
    assert decided[0] == decided[1] and {event["step"] for event in decided[0]} == set(range(6))
    states = [driver_state(side.run_directory / "checkpoints" / "step-00000005") for side in (uninterrupted, run)]
    assert states[0].pop("run") != states[1].pop("run")
    assert states[0] == states[1]

    # A run that is at its end ends well at once, and only exports what is missing; what a kill left is gone.
    exported = run.model()
    shutil.rmtree(killed / "model")
    lines = run.output.splitlines()
    engine, ray = run.temporary / "engine3d-rollout-killed_1", run.temporary / "hf-ray-killed_1"
    for directory in (engine, ray):
        directory.mkdir()
        (directory / "log").touch()
        (directory / "owner").touch()
    segment = Path(f"/dev/shm/killed-{engine.name}")
    segment.touch()
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    assert not outcome.left_over
    assert run.output.splitlines()[-4:] == lines[-4:]
    assert lines[-3:-1] == [
        f"model        {killed}/model (a HuggingFace directory)",
        f"checkpoints  {killed}/checkpoints/step-00000005",
    ]
    assert run.model() == exported
    assert compare(run, uninterrupted).identical


@pytest.mark.release
def test_a_run_that_is_asked_to_end_saves_and_resumes_as_the_uninterrupted_one(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    best = "keep_best: {metric: eval/sums/reward_mean, mode: min}"
    run = a_run(tmp_path, [*recipe, f"checkpoint={{save_interval: 1000, on_stop_s: 60, {best}}}"])
    checkpoints = run.run_directory / "checkpoints"
    # While engines respond, nothing of the step is there yet; while the models learn, it is waited for.
    for phase, step, said in (
        ("rollout", 2, "step 2: abandoned in phase rollout, as the run is to end"),
        ("update", 3, ""),
    ):
        outcome = run.run(Kill("driver", phase, step, 0.0, signal.SIGTERM))
        assert outcome.killed and outcome.exit_code == 75, run.output
        assert not outcome.left_over
        last = run.output[run.output.rindex("\nchecking ") :] if "\nchecking " in run.output else run.output
        assert (
            "hybridflow: terminated: the run saves a checkpoint, within 60 s, and ends; a second signal ends it at once"
        ) in last.splitlines()
        assert said in last
        saved = step - 1 if phase == "rollout" else step
        assert f"hybridflow: terminated; the checkpoint of step {saved} is whole" in last.splitlines()
        assert driver_state(checkpoints / f"step-{saved:08}")["step"] == saved
    assert run.run(Kill("driver", "update", 4, 0.0, signal.SIGUSR1)).exit_code == 0, run.output
    assert "hybridflow: SIGUSR1: the run saves a checkpoint after this step, and continues" in run.output.splitlines()
    assert [path.name for path in sorted(checkpoints.glob("step-*"))] == [
        f"step-{number:08}" for number in (0, 1, 3, 4, 5)
    ]
    assert compare(run, uninterrupted) == Comparison(identical=True, lost=0, duplicated=0)
    states = [driver_state(side.run_directory / "checkpoints" / "step-00000005") for side in (uninterrupted, run)]
    assert states[0].pop("run") != states[1].pop("run")
    assert states[0] == states[1]


@pytest.mark.long
def test_a_run_goes_on_under_another_name_on_another_layout(
    uninterrupted: KilledRun, recipe: list[str], tmp_path: Path
) -> None:
    checkpoint = uninterrupted.run_directory / "checkpoints" / "step-00000004"
    layout = ["train.layout.ep=1", "train.layout.tp=2", "rollout.verify_weights=true"]
    layout += ["placement.rollout=cpu:2-3", "rollout.engine.tp=2", "rollout.engine.ep=2"]
    done = run_recipe(EVALUATED, tmp_path, *recipe, *layout, "name=other", f"resume={checkpoint}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "resume: train.layout.tp: 1 in the checkpoint, 2 in the recipe" in lines
    assert "resume: name: small in the checkpoint, other in the recipe" in lines
    other = tmp_path / "other"
    [mine], [theirs] = records(other, "train"), records(uninterrupted.run_directory, "train")[-1:]
    assert mine["step"] == theirs["step"] == 5
    # The same weights, prompts and seeds: the same tokens; then sums in another order.
    assert mine["mismatch/logprob_abs_diff_mean"] < 1e-5
    assert mine["rollout/response_length_mean"] == theirs["rollout/response_length_mean"]
    assert mine["reward/mean"] == theirs["reward/mean"]
    assert mine["train/learning_rate"] == theirs["train/learning_rate"]
    for name in ("train/loss", "train/reference_kl", "train/entropy", "train/gradient_norm"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert mine["train/skipped_updates"] == 0
    for phase in ("begin", "send", "seal", "verify", "commit"):
        assert 0 < mine[f"sync/{phase}_ms"] < mine["sync/time_ms"]
    # On devices of its own the engine gets everything; where it shares the actor's, most is the actor's memory.
    assert mine["sync/aliased_bytes"] == 0 < theirs["sync/aliased_bytes"]
    for record in (mine, theirs):
        moved = record.get("sync/one_sided_bytes", 0) + record.get("sync/collective_bytes", 0)
        assert moved == record["sync/moved_bytes"] > 0
    assert (other / "metrics.csv").is_file() and list((other / "tensorboard").rglob("events*"))
    model, initial = (AutoModelForCausalLM.from_pretrained(other / name) for name in ("model", "initial"))
    assert not torch.equal(model.lm_head.weight, initial.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(other / "model")
    assert tokenizer.encode("1+2=", add_special_tokens=False) == [4, 13, 5, 16]
    states = [
        driver_state(directory / "checkpoints" / "step-00000005") for directory in (uninterrupted.run_directory, other)
    ]
    for name in ("sampler", "samples_drawn", "policy_version", "updates"):
        assert states[0][name] == states[1][name], name
