"""A run's directory: never two runs in one, and no run lost."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.data.prompts import prompt_limit
from hybridflow.rundir.status.lock import check_free, claim
from hybridflow.trainer.startup.run_setup import open_run, prepare
from tests.support.resumable import a_recipe, make_checkpoint


def test_an_earlier_run_is_kept_under_another_name(tmp_path: Path) -> None:
    for number in range(3):
        with claim(tmp_path / "run", overwrite=True):
            (tmp_path / "run" / "recipe.yaml").write_text("")
            (tmp_path / "run" / "metrics.jsonl").write_text(str(number))
    kept = {path.name: (path / "metrics.jsonl").read_text() for path in tmp_path.iterdir()}
    assert kept == {"run.1": "0", "run.2": "1", "run": "2"}


@pytest.mark.slow
def test_a_used_name_is_refused_by_what_to_write(tmp_path: Path) -> None:
    run, recipe = tmp_path / "small", a_recipe(tmp_path)
    prepare(recipe).lock.close()
    (run / "phase.json").write_text('{"step": 3, "phase": "update", "since": 1.0}')
    rest = "overwrite=true starts afresh and keeps it as small.1, name=OTHER takes another directory"
    with pytest.raises(UserError) as refused:
        prepare(recipe)
    assert str(refused.value) == f"name: {run} has a run already, without a checkpoint for resume=auto; {rest}"
    make_checkpoint(recipe, 2)
    with pytest.raises(UserError) as refused:
        prepare(recipe)
    assert str(refused.value) == f"name: {run} has a run already; resume=auto continues it; {rest}"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    with prepare(a_recipe(tmp_path, "overwrite=true")).lock, pytest.raises(UserError, match="is going on"):
        check_free(run)
    assert (tmp_path / "small.1" / "checkpoints" / "step-00000002").is_dir() and not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("phase", "metrics", "is_kept"), [("start", "", False), ("start", "{}\n", True), ("update", "", True)]
)
def test_a_run_that_ended_before_it_had_begun_is_in_nobodys_way(
    tmp_path: Path, phase: str, metrics: str, is_kept: bool
) -> None:
    run = tmp_path / "run"
    with claim(run):
        (run / "recipe.yaml").write_text("")
        (run / "phase.json").write_text(f'{{"step": 0, "phase": "{phase}", "since": 1.0}}')
        (run / "metrics.jsonl").write_text(metrics)
    with pytest.raises(UserError, match="has a run already") if is_kept else nullcontext():
        claim(run).close()
    assert (tmp_path / "run.1").exists() != is_kept


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    with claim(tmp_path / "run"), pytest.raises(UserError, match="is going on; choose another name"):
        claim(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["well", "refused", "failed"])
def test_a_program_has_its_umask_again_after_a_private_run(tmp_path: Path, end: str) -> None:
    before = os.umask(0o022)
    try:
        if end == "refused":
            claim(tmp_path / "small").close()
            (tmp_path / "small" / "recipe.yaml").write_text("")
        expected = nullcontext() if end == "well" else pytest.raises(UserError)
        with expected, open_run(a_recipe(tmp_path, "private=true")):
            assert (os.umask(0o077), end) == (0o077, end)
            if end == "failed":
                raise UserError("a failure")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that are no run's"):
        claim(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*: Not a directory"):
        claim(tmp_path / "file" / "run")


@pytest.mark.slow
def test_the_demo_makes_its_model_and_splits(tmp_path: Path) -> None:
    recipe = load_recipe("launch/recipes/demo.yaml", [f"run_dir={tmp_path}", "model.create.seed=7"])
    run = prepare(recipe)
    assert (run.model_directory / "model.safetensors").is_file() and (run.directory / "recipe.yaml").is_file()
    assert load_recipe(run.directory / "recipe.yaml") == recipe
    problems = [{example.prompt for example in phase.examples} for phase in (run.train, run.sets["eval"], run.sft)]
    assert not problems[0] & problems[1] and not problems[0] & problems[2] and not problems[1] & problems[2]
    assert len(run.answers) == len(run.sft) and all(answer[-1] == 2 for answer in run.answers)
    run.lock.close()


def test_a_response_that_fills_the_context_leaves_no_prompt() -> None:
    recipe = load_recipe("launch/recipes/demo.yaml", ["rollout.sampling.max_new_tokens=64"])
    with pytest.raises(UserError, match="max_new_tokens=64 leaves no room for a prompt in a context of 64"):
        prompt_limit(recipe.rollout, recipe.model, given=False)
