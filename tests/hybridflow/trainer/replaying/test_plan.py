"""Plans of replays, and refusals before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import Recipe
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.rundir.samples.files import sample_file
from hybridflow.trainer.replaying.plan import plan_replay
from tests.support.resumable import a_recipe, make_checkpoint
from tests.support.stored_samples import learned_from, samples_of, store

TEXTS = [("1+1=", "2"), ("1+1=", "3 abc"), ("2+1=", "3"), ("2+1=", "22")]
STEPS = range(1, 7)


def make_run(directory: Path, *overrides: str, checkpoints: tuple[int, ...] = (2, 4)) -> Recipe:
    """The directory of a run of six steps, which has learned nothing in the second."""
    recipe = a_recipe(directory, *overrides)
    recipe.directory.mkdir()
    (recipe.directory / "recipe.yaml").write_text(settings_yaml(recipe))
    (recipe.directory / ".run").write_text("first\n")
    lines, events = [], [{"step": 0, "event": "weights", "version": 1, "digests": ["00"]}]
    for step in STEPS:
        lines.append({"phase": "train", "step": step, "train/loss": 0.5, "train/update_time_ms": 1.0})
        if step == 2:
            del lines[-1]["train/update_time_ms"]
        else:
            samples = samples_of(TEXTS, [0.0, 1.0, 0.5, 0.25], first=4 * step, group=2)
            store(recipe.directory, learned_from(step, samples))
        events.append({"step": step, "event": "weights", "version": step + 1, "digests": [f"0{step}"]})
    (recipe.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (recipe.directory / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    for step in checkpoints:
        make_checkpoint(recipe, step)
    return recipe


def refusal(run: Path, step: int, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_replay(run, step, overrides)
    return str(caught.value)


@pytest.mark.slow
def test_a_step_begins_at_the_nearest_checkpoint_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path).directory
    plan = plan_replay(run, 4)
    assert (plan.base, plan.checkpoint, plan.after) == (
        2,
        run / "checkpoints/step-00000002",
        run / "checkpoints/step-00000004",
    )
    assert list(plan.steps) == [3, 4] and plan.changed == ()
    assert [original.digests for original in plan.steps.values()] == [("03",), ("04",)]
    metadata = plan.steps[4].metadata
    assert metadata is not None and (metadata.step, metadata.version, metadata.samples) == (4, 5, 4)
    assert plan_replay(run, 5).base == 4 and plan_replay(run, 5).after is None


@pytest.mark.slow
def test_a_replay_evaluates_no_sets(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+2=", "answer": 3}\n')
    run = make_run(tmp_path, f"evaluation.sums.data.path={tmp_path / 'sums.jsonl'}").directory
    recipe = plan_replay(run, 3).recipe
    assert not recipe.sets
    check_recipe(recipe)  # no engines are needed for the set


@pytest.mark.slow
def test_a_replay_has_a_directory_of_its_own_and_no_engines(tmp_path: Path) -> None:
    run = make_run(tmp_path).directory
    recipe = plan_replay(run, 3).recipe
    assert recipe.directory == tmp_path / "small.replay-3" and not recipe.starts_engines
    assert list(recipe.device_maps) == ["actor"] and not recipe.functions
    assert recipe.resume == run / "checkpoints/step-00000002"
    assert plan_replay(run, 3, ["name=other"]).recipe.directory == tmp_path / "other"
    assert "in the run's own directory" in refusal(run, 3, "name=small")
    assert "in the run's own directory" in refusal(run, 3, f"run_dir={run}")
    moved = run.rename(tmp_path / "moved")
    assert plan_replay(moved, 3).checkpoint == moved / "checkpoints/step-00000002"


@pytest.mark.slow
def test_a_replay_keeps_no_best_checkpoint(tmp_path: Path) -> None:
    """It saves none after its steps, of which its run might choose one."""
    keep = ("evaluation.sums.data.path=sums.jsonl", "checkpoint.keep_best={metric: eval/sums/pass@1}")
    run = make_run(tmp_path, *keep, "evaluation.sums.interval=1", "warmup=null").directory
    plan = plan_replay(run, 3)
    assert plan.base == 2 and plan.recipe.checkpoint.keep_best is None and plan.changed == ()


@pytest.mark.slow
def test_other_settings_make_other_bits(tmp_path: Path) -> None:
    run = make_run(tmp_path).directory
    plan = plan_replay(run, 3, ["train.layout={ep: 1, tp: 2}", "limits.call_s=1000", "placement.actor=cpu:2-3"])
    assert plan.changed == ("train.layout.tp=2", "train.layout.ep=1", 'placement.actor="cpu:2-3"')
    assert "the run had other settings than train.layout.tp=2" in plan.inexact[0]


@pytest.mark.slow
def test_a_run_that_was_resumed_with_other_settings_may_have_made_other_bits(tmp_path: Path) -> None:
    recipe = make_run(tmp_path, checkpoints=())
    make_checkpoint(a_recipe(tmp_path, "train.micro_batch_tokens=4096", "trainer.steps=3", "limits.call_s=99"), 2)
    plan = plan_replay(recipe.directory, 3)
    assert plan.changed == ()
    others = [line for line in plan.inexact if "checkpoints were saved" in line]
    assert others == ["the run's checkpoints were saved with other settings than train.micro_batch_tokens=8192"]


def test_a_step_that_has_updated_nothing_needs_no_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path, "warmup=null", checkpoints=(4,)).directory
    plan = plan_replay(run, 3)
    assert (plan.base, plan.checkpoint, plan.recipe.resume) == (0, None, "none")
    assert [original.path is None for original in plan.steps.values()] == [False, True, False]


@pytest.mark.slow
def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path).directory
    assert "has done no step 7; its metrics.jsonl has the steps 1 to 6" in refusal(run, 7)
    line = refusal(run, 2)
    assert "no checkpoint before step 2 is left" in line and "it began with a warm-up" in line
    sample_file(run / "samples", 3).unlink()
    assert plan_replay(run, 5).base == 4
    line = refusal(run, 4)
    assert "no samples of step 3 in" in line and "needed from step 3 on; it has those of steps 1 to 6" in line
    assert "resume is set, which a replay sets itself" in refusal(run, 5, "resume=auto")
    assert "samples.store is set" in refusal(run, 5, "samples.store=true")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 5' not in line))
    assert "metrics.jsonl of the run in" in refusal(run, 6) and "has no step 5, which is needed" in refusal(run, 6)
    (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1e999}\n')
    assert "expected an object with phase and step" in refusal(run, 5)
    (run / "metrics.jsonl").unlink()
    assert "metrics.jsonl=false" in refusal(run, 5)


@pytest.mark.slow
def test_checkpoints_and_samples_of_another_run_are_not_taken(tmp_path: Path) -> None:
    recipe = make_run(tmp_path)
    run = recipe.directory
    make_checkpoint(recipe, 5, run="other")
    assert plan_replay(run, 6).base == 4
    sample_file(run / "samples", 5).write_bytes(sample_file(run / "samples", 6).read_bytes())
    assert "is of step 6 and made version 7 of the weights, expected step 5 and version 6" in refusal(run, 5)
    sample_file(run / "samples", 5).write_bytes(b"no parquet")
    assert "holds no samples of a step that can be made again" in refusal(run, 5)


@pytest.mark.slow
def test_greedy_baselines_are_among_the_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path, "algorithm.name=remax").directory
    assert "has no column baseline" in refusal(run, 3)
    samples = samples_of(TEXTS, [0.0, 1.0, 0.5, 0.25], first=12, group=2)
    learned = learned_from(3, samples)
    store(run, type(learned)(3, 4, learned.batches, {}, {6: 0.5, 7: 0.25}))
    assert plan_replay(run, 3).base == 2
