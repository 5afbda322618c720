"""Relative paths of a recipe: all from the directory where the command runs, and errors say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import load_recipe

RECIPE = """
base: {base}
name: mine
run_dir: out
model: {{path: models/actor, create: null}}
critic: {{path: models/critic}}
reward_model: {{path: models/judge}}
algorithm: {{name: ppo}}
checkpoint: {{dir: saved}}
resume: earlier
reward: {{functions: [{{name: a, path: "rewards/a.py:score"}}, {{name: b, path: "package.b:score"}}]}}
data: {{source: jsonl, jsonl: {{train_path: data/train.jsonl, eval_path: data/eval.jsonl}}}}
"""
DEMO = Path(__file__).parents[4] / "launch/recipes/demo.yaml"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a folder of its own, beside the one where the command runs."""
    for name in ("recipes", "here"):
        (tmp_path / name).mkdir()
    path = tmp_path / "recipes" / "mine.yaml"
    path.write_text(RECIPE.format(base=DEMO))
    monkeypatch.chdir(tmp_path / "here")
    return path


def test_every_path_starts_where_the_command_runs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    read = load_recipe("../recipes/mine.yaml")
    assert read.directory == here / "out" / "mine"
    assert read.checkpoint_directory == here / "saved"
    assert (read.model.path, read.critic.path) == (here / "models/actor", here / "models/critic")
    assert read.reward_model is not None and read.reward_model.path == here / "models/judge"
    assert read.resume == here / "earlier"
    assert read.data.jsonl is not None and read.reward is not None
    assert read.data.jsonl.train_path == here / "data/train.jsonl"
    assert read.data.jsonl.eval_path == here / "data/eval.jsonl"
    assert [function.path for function in read.reward.functions] == [f"{here}/rewards/a.py:score", "package.b:score"]
    # What a run writes of its recipe means the same elsewhere.
    (tmp_path / "written.yaml").write_text(settings_yaml(read))
    monkeypatch.chdir(tmp_path)
    assert load_recipe(tmp_path / "written.yaml") == read
    assert load_recipe(DEMO).directory == tmp_path / "runs" / "demo"


@pytest.mark.slow
def test_an_error_says_what_a_path_is_relative_to(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    origin = f"(a relative path starts from {here}, where the command runs)"
    assert main(["check", str(recipe)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for what in ("models/actor", "models/critic", "models/judge"):
        assert [line for line in lines if f"{here}/{what}" in line and line.endswith(origin)], (what, lines)
    data = "data={source: jsonl, jsonl: {train_path: no.jsonl, eval_path: no.jsonl}}"
    assert main(["check", str(DEMO), data]) == 2
    assert f"{here}/no.jsonl" in (line := capsys.readouterr().err.splitlines()[0]) and line.endswith(origin)
    for name in ("no.parquet", "no-*.parquet"):
        data = f"data={{source: files, files: {{train: [{{path: {name}}}]}}}}"
        assert main(["check", str(DEMO), data, "evaluation.eval=null"]) == 2
        assert f"{here}/{name}: no" in (line := capsys.readouterr().err.splitlines()[0]) and line.endswith(origin)
    assert main(["check", str(DEMO), 'reward.functions=[{name: a, path: "no.py:score"}]']) == 2
    assert f"file {here}/no.py does not exist {origin}" in capsys.readouterr().err
    assert main(["check", str(DEMO), "resume=no"]) == 2
    assert f"resume: no such directory: {here}/no;" in (line := capsys.readouterr().err.splitlines()[0])
    assert line.endswith(origin)
    assert main(["check", str(DEMO), 'reward.functions=[{name: a, path: "/no.py:score"}]']) == 2
    assert origin not in capsys.readouterr().err
