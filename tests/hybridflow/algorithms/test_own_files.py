"""Algorithms in files of the user: loaded, refused, and sent to processes that have never seen them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engine3d.errors import UserError
from hybridflow.algorithms.config import AnyAlgorithm, load
from hybridflow.algorithms.own_files import own_source
from hybridflow.api.config import PPOConfig
from hybridflow.checkpoint.compatibility import input_checksums
from hybridflow.config.recipe import load_recipe
from tests.support.resumable import DEMO

OWN = """
from dataclasses import replace
from pydantic import Field
from hybridflow.algorithms.settings import ClippedSettings
from hybridflow.algorithms.without_critic import without_critic

class MySettings(ClippedSettings):
    shift: float = Field(default=0.0, ge=-1)

def with_advantages(step, experience):
    rewards = experience.batch.per_sample["rewards"]
    return replace(experience, batch=experience.batch.with_per_sample(advantages=rewards - step.config.shift))

ALGORITHM = without_critic(MySettings, with_advantages)
"""


class Group(BaseModel):
    algorithm: AnyAlgorithm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def build(**settings: Any) -> Any:
    return Group.model_validate({"algorithm": settings}).algorithm


def test_its_settings_are_those_of_its_class(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    settings = build(name="mine.py:ALGORITHM", shift=0.5, clip_low=0.1)
    assert (settings.name, settings.shift, settings.clip_low) == (f"{path}:ALGORITHM", 0.5, 0.1)
    assert load(settings.name).settings is type(settings)
    assert not settings.needs_critic and not settings.needs_reference


def test_a_recipe_is_written_and_read_with_it(path: Path) -> None:
    given = f"algorithm={{name: {path}:ALGORITHM, shift: 0.25}}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = load_recipe(DEMO, [given])
        written = recipe.model_dump(mode="json")["algorithm"]
    assert written["shift"] == 0.25 and written["name"] == f"{path}:ALGORITHM"
    assert build(**written) == recipe.algorithm
    assert input_checksums(recipe.algorithm.name, recipe.model.path, recipe.data)["algorithm.file"]


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (None, "ALGORITHM", "{path}: no such file"),
        ("x = 1", "ALGORITHM", "{path} has no 'ALGORITHM', expected ALGORITHM = Algorithm(...) in it"),
        ("ALGORITHM = 3", "ALGORITHM", "is a int, expected an Algorithm of hybridflow.algorithms.base"),
        ("\n1 / 0", "ALGORITHM", "{path} cannot be imported: ZeroDivisionError in line 2: division by zero"),
        ("import nothing_of_this_name", "ALGORITHM", "cannot be imported: ModuleNotFoundError in line 1"),
        ("def f(:", "ALGORITHM", "{path} cannot be imported: SyntaxError in line 1"),
        ("import sys\nsys.exit('\\x1b[31mno')", "ALGORITHM", "cannot be imported: SystemExit in line 2: ?[31mno"),
        (OWN.replace("MySettings, with", "dict, with"), "ALGORITHM", "expected a subclass of AlgorithmSettings"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_one_line(tmp_path: Path, text: str | None, name: str, reason: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        load_recipe(DEMO, [f"algorithm.name={path}:{name}"])
    assert reason.format(path=path) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"shift": -2}, "algorithm.shift = -2: expected at least -1"),
        ({"clip_low": "a"}, "algorithm.clip_low = 'a': expected a number"),
        ({"shft": 1}, "unknown key shft with name"),
        ({"dynamic_sampling": True}, "unknown key dynamic_sampling with name"),
    ],
)
def test_its_settings_are_checked(path: Path, settings: dict[str, Any], reason: str) -> None:
    given = {"name": f"{path}:ALGORITHM", **settings}
    with pytest.raises(UserError) as error:
        load_recipe(DEMO, [f"algorithm={json.dumps(given)}"])
    assert reason in str(error.value)


def test_the_python_api_takes_it(path: Path) -> None:
    assert PPOConfig(algorithm=f"{path}:ALGORITHM").algorithm == f"{path}:ALGORITHM"


READ = """
import pickle, sys
settings, function = pickle.load(sys.stdin.buffer)
print(settings.shift, function.__name__, function.__module__ == type(settings).__module__)
"""


@pytest.mark.slow
def test_a_process_that_has_not_loaded_it_unpickles_it(path: Path) -> None:
    settings = build(name=f"{path}:ALGORITHM", shift=0.5)
    function = load(settings.name).with_advantages
    data = pickle.dumps((settings, function))
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, input=data, capture_output=True, check=True, cwd=os.sep)
    assert done.stdout.decode().split() == ["0.5", "with_advantages", "True"]
    path.unlink()
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    assert f"the algorithm's file {path} is not there on this host" in done.stderr.decode()


def test_the_example_is_one() -> None:
    settings = build(name=f"{DEMO.parents[2]}/examples/own_algorithm.py:ALGORITHM", shift=0.1)
    assert settings.shift == 0.1 and load(settings.name).settings is type(settings)


def test_hosts_compare_its_text(path: Path) -> None:
    recipe = {"algorithm": {"name": f"{path}:ALGORITHM"}}
    assert own_source(recipe) == OWN
    path.unlink()
    assert own_source(recipe) == f"no file {path}"
    assert own_source({"algorithm": {"name": "grpo"}}) is None and own_source({"algorithm": "grpo"}) is None
