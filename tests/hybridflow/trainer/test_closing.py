"""The last lines of a run: where its results are, and the command that resumes it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import Recipe
from hybridflow.trainer.closing import has_begun, how_to_resume, results
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.resumable import DEMO, a_recipe, make_checkpoint
from tests.support.runs import ROOT
from tests.support.warm import warm_python


def _results(recipe: Recipe) -> list[str]:
    exports = recipe.trainer.export
    return results(recipe.directory, recipe.checkpoint, recipe.checkpoint_directory, exports=exports)


def _how_to_resume(recipe: Recipe, arguments: Sequence[str], damaged: Path | None = None) -> list[str]:
    if not has_begun(recipe.directory, settings_yaml(recipe)):
        return []
    return how_to_resume(recipe.directory, recipe.checkpoint, recipe.checkpoint_directory, arguments, damaged)


def test_a_run_that_ends_says_where_its_results_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = a_recipe(tmp_path / "runs")
    make_checkpoint(recipe, 2)
    newest = make_checkpoint(recipe, 4)
    assert _results(recipe) == [
        "model        runs/small/model (a HuggingFace directory)",
        "checkpoints  runs/small/checkpoints/step-00000004",
        "report       hybridflow report runs/small draws runs/small/report.html",
    ]
    monkeypatch.chdir("/")
    assert _results(a_recipe(tmp_path / "runs", "trainer.export=false"))[:2] == [
        f"model        not exported; hybridflow checkpoint export {newest.relative_to('/')} OUT does so",
        f"checkpoints  {newest.relative_to('/')}",
    ]
    nothing = a_recipe(tmp_path, "trainer.export=false", "checkpoint.save_interval=null")
    assert _results(nothing)[:2] == [
        "model        not kept (trainer.export=false, checkpoint.save_interval=null)",
        "checkpoints  none (checkpoint.save_interval=null)",
    ]


@pytest.mark.slow
def test_what_was_interrupted_is_resumed_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = a_recipe(tmp_path)
    arguments = [str(DEMO), "resume=none", "algorithm={kl_coef: 0.1}", "--track_metrics"]
    assert _how_to_resume(recipe, arguments) == []  # it had not begun
    prepare(recipe).lock.close()
    assert _how_to_resume(recipe, arguments) == [
        "hybridflow: metrics and logs are in small",
        "hybridflow: nothing to resume from: the first checkpoint was not complete yet",
    ]
    make_checkpoint(recipe, 3)
    *_, said, command = _how_to_resume(recipe, arguments)
    assert said == "hybridflow: the newest checkpoint is of step 3; to resume after it:"
    assert shlex.split(command) == [
        *("hybridflow", "train", str(DEMO), "algorithm={kl_coef: 0.1}", "--track_metrics", "resume=auto")
    ]
    assert _how_to_resume(a_recipe(tmp_path, "seed=3"), arguments) == []  # the directory is another run's
    # A damaged one is not recommended.
    shard = make_checkpoint(recipe, 5) / "actor" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert _how_to_resume(recipe, arguments)[1:] == [said, f"  {command.strip()}"]
    assert _results(recipe)[1] == "checkpoints  small/checkpoints/step-00000003"


@pytest.mark.slow
def test_a_checkpoint_in_which_ranks_found_damage_is_not_recommended(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    prepare(recipe).lock.close()
    damaged = make_checkpoint(recipe, 5)
    *_, reason = _how_to_resume(recipe, [str(DEMO)], damaged)
    assert reason == f"hybridflow: nothing to resume from: {damaged} is damaged, and there is no other checkpoint"
    make_checkpoint(recipe, 3)
    *_, said, _ = _how_to_resume(recipe, [str(DEMO)], damaged)
    assert said == "hybridflow: the newest checkpoint is of step 3; to resume after it:"


@pytest.mark.slow
def test_a_run_without_a_checkpoint_resumes_from_that_of_its_start(tmp_path: Path) -> None:
    earlier = make_checkpoint(a_recipe(tmp_path, "name=earlier"), 3)
    recipe = a_recipe(tmp_path, f"resume={earlier}")
    prepare(recipe).lock.close()
    for _ in range(2):  # the checkpoint is that of the second start too
        lines = _how_to_resume(recipe, [str(DEMO), f"resume={earlier}"])
        assert (
            lines[1] == f"hybridflow: no checkpoint of this run is complete yet; to resume from {earlier}, as it did:"
        )
        assert lines[2].endswith("resume=auto")
        recipe = a_recipe(tmp_path, "resume=auto")
        run = prepare(recipe)
        run.lock.close()
        assert run.resumption is not None and run.resumption.directory == earlier and run.steps_done == 3
    assert _how_to_resume(recipe, [str(DEMO)], earlier)[1].endswith(
        f"{earlier} is damaged, and there is no other checkpoint"
    )
    shutil.rmtree(earlier)
    with pytest.raises(UserError, match=f"resume: no such directory: {earlier}"):
        prepare(recipe)


# A run that saves a checkpoint and then ends in a certain way; in a process of its own, which signals end for good.
ENDING = """
import os, signal, sys, time, types
from engine3d.errors import DamagedCheckpointError, EngineError
from hybridflow.cli import main
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.resumable import make_checkpoint

def run(recipe):
    prepare(recipe).lock.close()
    make_checkpoint(recipe, 3)
    if sys.argv[1] == "damaged":
        error = DamagedCheckpointError("load: rank 0: it is damaged")
        error.checkpoint = make_checkpoint(recipe, 4)
        raise error
    if sys.argv[1] == "fail":
        raise EngineError("rollout rank 0: it died")
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(30)

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what runs in the background ignore it
sys.modules["hybridflow.trainer.run"] = types.SimpleNamespace(train=run)  # whose imports take a second
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "code", "first"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "terminated"),
        ("fail", 1, "rollout rank 0: it died"),
        ("damaged", 1, "load: rank 0: it is damaged"),
    ],
)
def test_the_command_says_how_to_resume(tmp_path: Path, end: str, code: int, first: str) -> None:
    overrides = [f"run_dir={tmp_path}", "name=small", "checkpoint.save_interval=1"]
    program = tmp_path / "ending.py"
    program.write_text(ENDING)
    done = subprocess.run(
        [warm_python(), str(program), end, "train", str(DEMO), *overrides],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == code, done.stderr
    shown, _, card = done.stderr.partition("hybridflow: first failure\n")
    assert card.startswith(f"  cause      {first}\n") == (code == 1)
    lines = shown.splitlines()
    assert lines[0].startswith(f"hybridflow: {first}")
    assert lines[1:] == [
        f"hybridflow: metrics and logs are in {tmp_path}/small",
        "hybridflow: the newest checkpoint is of step 3; to resume after it:",
        "  " + shlex.join(["hybridflow", "train", str(DEMO), *overrides, "resume=auto"]),
    ]
