"""A recipe and settings in the words of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.common.command_words import as_settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.yaml", "seed=1", "--actor", "one"], ["a.yaml", "seed=1", "--actor", "one"]),
        (["--config", "a.yaml", "seed=1"], ["a.yaml", "seed=1"]),
        (["seed=1", "--config=a.yaml"], ["a.yaml", "seed=1"]),
        (["@", "a.yaml", "seed=1"], ["a.yaml", "seed=1"]),
        (["a.yaml", "--resume", "seed=1"], ["a.yaml", "resume=auto", "seed=1"]),
        (["--resume", "a.yaml"], ["resume=auto", "a.yaml"]),
        (["a.yaml", "--resume=b"], ["a.yaml", "resume=b"]),
        (["a.yaml", "--overwrite"], ["a.yaml", "overwrite=true"]),
        (["a.yaml", "--config"], ["a.yaml", "--config"]),
    ],
)
def test_options_become_settings(words: list[str], expected: list[str]) -> None:
    assert as_settings(words) == expected


def test_a_directory_behind_resume_is_what_is_resumed(tmp_path: Path) -> None:
    assert as_settings(["a.yaml", "--resume", str(tmp_path)]) == ["a.yaml", f"resume={tmp_path}"]
