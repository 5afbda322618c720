"""Settings of prompts from files: names of sources, conditions, weights by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.data.files.config import ChatConfig, Condition, DifficultyConfig, FilesConfig, FileSource


def test_paths_are_absolute_and_addresses_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = FileSource.model_validate({"path": ["a.jsonl", "s3://bucket/b.parquet", "/c/*.csv"]})
    assert source.path == (str(tmp_path / "a.jsonl"), "s3://bucket/b.parquet", "/c/*.csv")
    assert FileSource.model_validate({"path": "a.jsonl"}).path == (str(tmp_path / "a.jsonl"),)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/a/train.jsonl", "train"),
        ("/a/train.jsonl.gz", "train"),
        ("/a/saved/", "saved"),
        ("s3://b/c/part-*.parquet", "part-_"),
        ("/a/..csv", "data"),
    ],
)
def test_a_source_is_named_by_its_first_file(path: str, label: str) -> None:
    assert FileSource.model_validate({"path": path}).label == label
    assert FileSource.model_validate({"path": path, "name": "mine"}).label == "mine"


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        ({"min": 1, "max": 2}, [1, 2, 1.5], [0, 2.1, "1", True, None, float("nan")]),
        ({"max": 2}, [-5], [3, float("nan")]),
        ({"one_of": ["a", 3]}, ["a", 3], ["b", None, [3]]),
        ({"none_of": ["a"]}, ["b", 3], ["a", None]),
        ({"min": 1, "none_of": [2]}, [1, 3], [0, 2]),
    ],
)
def test_what_a_condition_lets_through(condition: dict[str, Any], holds: list[Any], fails: list[Any]) -> None:
    checked = Condition.model_validate(condition)
    assert all(checked.holds(value) for value in holds)
    assert not any(checked.holds(value) for value in fails)


def test_a_value_or_a_list_of_them_stands_for_one_of() -> None:
    source = FileSource.model_validate({"path": "a.jsonl", "where": {"a": 1, "b": ["x", "y"], "c": {"min": 0}}})
    assert [source.where[name].one_of for name in "abc"] == [(1,), ("x", "y"), None]


def test_the_weight_of_a_step() -> None:
    source = FileSource.model_validate({"path": "a", "weight": [{"step": 1, "weight": 0}, {"step": 5, "weight": 2.5}]})
    assert [source.weight_at(step) for step in (1, 4, 5, 100)] == [0, 0, 2.5, 2.5]
    assert FileSource.model_validate({"path": "a", "weight": 3}).weight_at(9) == 3
    assert FileSource.model_validate({"path": "a", "weight": None}).weight == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": []}, "expected at least one file"),
        ({"path": ["a", ""]}, "no empty name"),
        ({"path": "a", "where": {"x": {}}}, "no condition is set"),
        ({"path": "a", "where": {"x": {"min": None}}}, "no condition is set"),
        ({"path": "a", "where": {"x": {"min": 2, "max": 1}}}, "min=2 is above max=1"),
        ({"path": "a", "weight": [{"step": 2, "weight": 1}]}, r"steps \[2\], expected ascending ones from 1"),
        ({"path": "a", "weight": [{"step": 1, "weight": 1}] * 2}, r"steps \[1, 1\], expected ascending"),
        ({"path": "a", "weight": 0}, "weight is never above 0"),
        ({"path": "a", "format": "csv", "split": "train"}, "split=train with format=csv"),
        ({"path": "a", "rows": 0}, "rows"),
        ({"path": "a", "name": "a:b"}, "name"),
        ({"path": "a", "format": "xml"}, "format"),
        ({"path": "a", "columns": 1}, "columns"),
    ],
)
def test_settings_of_a_source_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FileSource.model_validate(settings)


def test_settings_of_files_that_cannot_be() -> None:
    one, other = {"path": "/a/x.jsonl"}, {"path": "/b/x.csv"}
    with pytest.raises(ValueError, match="train has two sources named 'x', expected a name of its own for each"):
        FilesConfig.model_validate({"train": [one, other]})
    with pytest.raises(ValueError, match="sft has two sources named 'x'"):
        FilesConfig.model_validate({"train": [one], "sft": [one, one]})
    with pytest.raises(ValueError, match="max_prompt_tokens=3 is below min_prompt_tokens=4"):
        FilesConfig.model_validate({"train": [one], "min_prompt_tokens": 4, "max_prompt_tokens": 3})
    with pytest.raises(ValueError, match="train has a weight for x and none for y"):
        FilesConfig.model_validate({"train": [one | {"weight": 1}, other | {"name": "y"}]})
    with pytest.raises(ValueError, match="sft has a weight for y, expected one of training prompts alone"):
        FilesConfig.model_validate({"train": [one], "sft": [one, other | {"name": "y", "weight": 2}]})
    steps = [{"step": 1, "weight": 1}, {"step": 7, "weight": 0}]
    with pytest.raises(ValueError, match="no source with a weight above 0 from step 7 on"):
        FilesConfig.model_validate({"train": [one | {"weight": steps}]})
    with pytest.raises(ValueError, match="train"):
        FilesConfig.model_validate({"train": []})
    with pytest.raises(ValueError, match=r"low=0\.5 is above high=0\.2"):
        DifficultyConfig(low=0.5, high=0.2)
    with pytest.raises(ValueError, match="texts"):
        ChatConfig.model_validate({"texts": "system"})
