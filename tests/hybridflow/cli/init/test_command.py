"""`hybridflow init`: what it writes is a recipe with nothing wrong in it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.resumable import a_recipe


def written(directory: Path, *words: str) -> Recipe:
    assert main(["init", str(directory), *words]) == 0
    return load_recipe(directory / "recipe.yaml", [f"run_dir={directory}/runs"])


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own model")
    chat = ("model.create.tokenizer=chat", "model.create.config.vocab_size=103")
    model = a_recipe(directory, *chat, "model.create.config.max_position_embeddings=600").model
    create_model(model, directory, seed=1)
    return directory


@pytest.mark.slow
def test_without_a_model_and_data_all_is_made(tmp_path: Path) -> None:
    recipe = written(tmp_path / "my run")
    assert recipe.name == "my-run" and recipe.model.create is not None and recipe.warmup is not None
    assert recipe.placement.actor == recipe.placement.rollout
    assert check_recipe(recipe) == []
    assert {path.name for path in (tmp_path / "my run").iterdir()} >= {"README.md", "reward.py", "train.jsonl"}


def test_a_name_that_yaml_takes_for_a_number_is_text(tmp_path: Path) -> None:
    assert written(tmp_path / "1e5").name == "1e5"


@pytest.mark.slow
def test_own_model_and_data_are_what_is_trained(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines(
        tmp_path / "own.jsonl",
        {"question": "2+2=?", "answer": "4", "level": 1},
        {"question": "a?", "answer": None, "level": 1},
    )
    recipe = written(tmp_path / "new", "--model", str(model), "--data", data)
    assert recipe.model.path == model and recipe.warmup is None
    assert recipe.rollout.sampling.max_new_tokens == 300  # half of the model's context
    assert f"columns of {data}: prompts: question; answers: answer; other columns: level" in capsys.readouterr().out
    notes = check_recipe(recipe)
    assert notes[0] == "data: 1 of 2 training rows of own are dropped: 1 with another answer (where)"
    assert "evaluation.trained_on: the model learns from 1 of its 1 prompts too" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "2+2"}], "reward_model": {"ground_truth": 4}},
        {"prompt": "Write."},
        {"problem": "2+2", "target": ["4", "four"]},
    ],
)
def test_data_of_other_layouts(tmp_path: Path, row: dict[str, Any]) -> None:
    recipe = written(tmp_path / "new", "--data", lines(tmp_path / "own.jsonl", row))
    [note] = check_recipe(recipe)
    assert note == "evaluation.trained_on: the model learns from 1 of its 1 prompts too"


def test_what_cannot_be_written_says_why_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    lines(tmp_path / "full" / "some.jsonl", {"prompt": "a", "answer": "b"})
    lines(tmp_path / "other.jsonl", {"prompt": "\N{SNOWMAN}", "answer": "b"})
    for words, said in (
        (["full"], "full is not empty; expected a new directory"),
        (["new", "--model", "Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B)"),
        (["new", "--model", "full"], "--model full: no config.json there"),
        (["new", "--data", "openai/gsm8k"], "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k)"),
        (["new", "--data", "full"], "full is a directory, expected one of its files: full/some.jsonl"),
        (
            ["new", "--data", "other.jsonl"],
            "has characters such as '\N{SNOWMAN}', and the tiny model reads ASCII alone",
        ),
        (["new", "--prompt", "a"], "--prompt is a column of --data, expected both"),
    ):
        assert main(["init", *words]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert said in line, line
        assert not (tmp_path / "new").exists()


def test_a_reward_that_cannot_be_imported_is_told_once(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines(tmp_path / "own.jsonl", {"question": "2+2=?", "answer": "4"})
    written(tmp_path / "new", "--model", str(model), "--data", data)
    (tmp_path / "new" / "reward.py").write_text("1 +")
    capsys.readouterr()
    assert main(["check", str(tmp_path / "new" / "recipe.yaml"), f"run_dir={tmp_path}/runs"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridflow: reward 'own' ")
