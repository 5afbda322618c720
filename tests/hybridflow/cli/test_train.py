"""`hybridflow train` of a used name, and `hybridflow resume` by the kept recipe, wherever the run is now."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.checkpoint.resume import find_resumption
from hybridflow.cli.main import main
from hybridflow.config.recipe import Recipe
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.resumable import DEMO, SMALL, a_recipe, make_checkpoint


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["resume", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_a_run_is_resumed_by_its_own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(a_recipe(tmp_path, "seed=5")).lock.close()
    make_checkpoint(a_recipe(tmp_path, "seed=5"), 2)
    moved = tmp_path / "elsewhere" / "2026"
    moved.parent.mkdir()
    (tmp_path / "small").rename(moved)
    recipes: list[Recipe] = []

    def run_recipe(recipe: Recipe) -> None:
        recipes.append(recipe)

    monkeypatch.setattr("hybridflow.trainer.run.train", run_recipe)
    monkeypatch.chdir(moved.parent)
    assert main(["resume", "2026", "trainer.steps=200"]) == 0
    [recipe] = recipes
    assert recipe.directory == moved and recipe.seed == 5 and recipe.trainer.steps == 200
    assert recipe.resume == "auto" and recipe.checkpoint_directory == moved / "checkpoints"


@pytest.mark.slow
def test_a_run_that_began_from_another_ones_checkpoint_is_resumed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = make_checkpoint(a_recipe(tmp_path, "name=earlier"), 2)
    prepare(a_recipe(tmp_path, f"resume={earlier}")).lock.close()
    checkpoints: list[Path | None] = []

    def run_recipe(recipe: Recipe) -> None:
        resumption, _ = find_resumption(recipe)
        checkpoints.append(resumption.directory if resumption is not None else None)

    monkeypatch.setattr("hybridflow.trainer.run.train", run_recipe)
    assert main(["resume", str(tmp_path / "small")]) == 0
    assert checkpoints == [earlier]


@pytest.mark.slow
def test_a_run_that_is_started_again_goes_on_if_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = make_checkpoint(a_recipe(tmp_path, "name=earlier"), 2)
    resumed: list[str | Path] = []
    monkeypatch.setattr("hybridflow.trainer.run.train", lambda recipe: resumed.append(recipe.resume))

    def start(*words: str) -> str | Path:
        assert main(["train", str(DEMO), f"run_dir={tmp_path}", "name=small", *SMALL, *words, "--again"]) == 0
        return resumed.pop()

    assert start() == "auto" and start(f"resume={earlier}") == earlier
    prepare(a_recipe(tmp_path, f"resume={earlier}")).lock.close()
    for named in (earlier, earlier.parent, tmp_path / "earlier"):
        assert start(f"resume={named}") == "auto"
    assert start(f"resume={earlier}", "overwrite=true") == earlier
    # Another run of the name, which is refused where it would be replaced.
    other = make_checkpoint(a_recipe(tmp_path, "name=other"), 2)
    assert start(f"resume={other}") == other


@pytest.mark.slow
def test_what_cannot_be_resumed_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = a_recipe(tmp_path)
    assert "no run in" in refusal(capsys, str(tmp_path)) and not (tmp_path / "small").exists()
    prepare(recipe).lock.close()
    assert "has saved no checkpoint; checkpoint.save_interval=10" in refusal(capsys, str(recipe.directory))
    make_checkpoint(recipe, 2)
    assert "name is that of the run in" in refusal(capsys, str(recipe.directory), "name=other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.yaml").write_text("")
    assert runs_in(tmp_path) != [tmp_path]
    assert "has the runs of several actors (other, small)" in refusal(capsys, str(tmp_path))


@pytest.mark.slow
def test_train_refuses_a_used_name_before_it_looks_at_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = a_recipe(tmp_path)
    prepare(recipe).lock.close()
    make_checkpoint(recipe, 2)
    words = [str(DEMO), f"run_dir={tmp_path}", "name=small", *SMALL]
    assert main(["train", *words, "train.layout.tp=7"]) == 2
    assert "resume=auto continues it; overwrite=true starts afresh" in capsys.readouterr().err
    assert main(["check", *words]) == 0
    assert "hybridflow train would refuse it now: name: " in capsys.readouterr().out
