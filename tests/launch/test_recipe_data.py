"""The data beside the recipes, and the recipes that read them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from hybridflow.cli.main import main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "launch/recipes/data"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", DATA / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _problems(rows: list[dict[str, Any]]) -> Iterator[str]:
    return (row["problem"] if "problem" in row else row["messages"][0]["content"] for row in rows)


@pytest.mark.slow
def test_the_files_hold_what_the_script_makes(script: ModuleType) -> None:
    made = script.chat_files() | script.math_files() | script.code_files() | script.game_files() | script.tools_files()
    assert {path.name for path in DATA.glob("*.parquet")} == set(made)
    for name, rows in made.items():
        assert pq.read_table(DATA / name).to_pylist() == rows, name
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 300_000


def test_no_problem_is_in_two_files_of_a_recipe(script: ModuleType) -> None:
    for files in (script.chat_files(), script.math_files(), script.code_files()):
        problems = [problem for rows in files.values() for problem in _problems(rows)]
        assert len(set(problems)) == len(problems)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [100, pytest.param(None, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "name",
    [
        "chat",
        "math",
        "game",
        "tools",
        pytest.param("code", marks=pytest.mark.skipif(not which("bwrap"), reason="no bubblewrap")),
    ],
)
def test_nothing_is_wrong_with_a_recipe_of_files(
    name: str, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments: rows: of each file of supervised examples that are read, all if None."""
    monkeypatch.chdir(ROOT)
    recipe = f"launch/recipes/{name}.yaml"
    sources = yaml.safe_load(Path(recipe).read_text())["data"]["files"]["sft"]
    supervised = json.dumps([source | {"rows": rows} for source in sources])
    assert main(["check", recipe, f"data.files.cache={tmp_path}", f"data.files.sft={supervised}"]) == 0
    assert capsys.readouterr() == (f"{recipe}: nothing wrong found\n", "")
