"""Measurements one after another: limits, requirements and results."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import make_model, series
from engine3d.models import load_model_spec

SERIES = Path(series.__file__).with_suffix("")


def written(directory: Path, *measurements: dict[str, Any]) -> Path:
    path = directory / "series.yaml"
    path.write_text(json.dumps(measurements))
    return path


def run(path: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = series.main([str(path), "--out", str(out), *options])
    measurements: dict[str, Any] = json.loads((out / "series.json").read_text())["measurements"]
    return code, measurements


def test_a_measurement_has_its_output_and_the_files_of_earlier_ones(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"name": "one", "command": "echo 7 > {scratch}/made; echo said; echo told >&2", "limit_s": 20},
        {"name": "two", "command": "cp {scratch}/made {here}/copy; echo '{a: 1}'", "limit_s": 20, "needs": "one"},
    )
    code, measurements = run(path, tmp_path / "out")
    assert (code, [measurement["exit_code"] for measurement in measurements.values()]) == (0, [0, 0])
    assert (tmp_path / "out/one/stdout").read_text() == "said\n"
    assert (tmp_path / "out/one/stderr").read_text() == "told\n"
    assert (tmp_path / "out/two/copy").read_text() == "7\n"
    assert (tmp_path / "out/two/stdout").read_text() == "{a: 1}\n"
    assert run(path, tmp_path / "again", "--only", "two")[1].keys() == {"two"}


@pytest.mark.processes
def test_a_measurement_over_its_limit_is_ended_with_its_processes_and_others_continue(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "name": "slow",
            "command": "sleep 600 & echo $! > {here}/pid; trap 'echo ended; exit' TERM; wait",
            "limit_s": 1,
        },
        {"name": "after", "command": "true", "limit_s": 20, "needs": "slow"},
        {"name": "last", "command": "true", "limit_s": 20, "needs": "after"},
        {"name": "fails", "command": "exit 3", "limit_s": 20},
        {"name": "other", "command": "true", "limit_s": 20},
    )
    code, measurements = run(path, tmp_path / "out")
    assert (code, [measurement["exit_code"] for measurement in measurements.values()]) == (1, [124, None, None, 3, 0])
    assert measurements["after"]["why"] == "slow has not ended well"
    assert (tmp_path / "out/slow/stdout").read_text() == "ended\n"
    pid = int((tmp_path / "out/slow/pid").read_text())
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_measurement_begins_that_could_not_end_in_time(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"name": "long", "command": "true", "limit_s": 100},
        {"name": "short", "command": "true", "limit_s": 20},
    )
    code, measurements = run(path, tmp_path / "out", "--within", "30")
    assert (code, [measurement["exit_code"] for measurement in measurements.values()]) == (1, [None, 0])
    assert measurements["long"]["why"] == "30 s were left of 100"


@pytest.mark.parametrize(
    ("measurements", "line"),
    [
        ([{"name": "a", "command": "true"}], "0.limit_s: Field required"),
        ([{"name": "a/b", "command": "true", "limit_s": 1}], "0.name: String should match"),
        ([{"name": "a", "command": "true", "limit_s": 1, "needs": "b"}], "a needs b, which is not before it"),
        ([{"name": "a", "command": "true", "limit_s": 1}] * 2, "a: two measurements have this name"),
    ],
)
def test_a_file_that_is_no_series_is_refused(
    measurements: list[dict[str, Any]], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *measurements)
    assert series.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert f"series.py: {path}: {line}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert series.main([str(tmp_path / "none.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(SERIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_series_that_are_kept_name_programs_and_recipes_that_are_there(path: Path) -> None:
    root = SERIES.parents[1]
    measurements = series.read_series(path)
    assert measurements
    for measurement in measurements:
        words = measurement.command.split()
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        program = next(word for word in words if word.endswith(".py"))
        gpus = "1" if measurement.name.startswith("one-") else path.stem.split("-")[1].removesuffix("gpu")
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", gpus]
        prefix = [word for word in words[: words.index(program)] if word != "--standalone"]
        assert prefix in (["python"], ["python", *launcher]) and (root / program).is_file()
        assert all((root / word).is_file() for word in words if word.startswith("launch/recipes/"))


def test_the_model_of_a_recipe_is_made_once_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(SERIES.parents[1] / "launch/recipes/demo.yaml")
    assert make_model.main([recipe, "--directory", str(tmp_path / "models/demo")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/models/demo: 0.0 GB in ")
    assert load_model_spec(tmp_path / "models/demo").sizes.layers
    assert list((tmp_path / "models/demo").glob("tokenizer*"))
    for arguments, line in (
        ([recipe, "--directory", str(tmp_path)], f"--directory: {tmp_path} is there already"),
        (
            [recipe, "--directory", str(tmp_path / "b"), "model.create=null", f"model.path={tmp_path / 'models/demo'}"],
            f"{recipe}: model.create is null, there is no model to be made",
        ),
    ):
        assert make_model.main(arguments) == 2
        assert capsys.readouterr().err == f"make_model.py: {line}\n"
