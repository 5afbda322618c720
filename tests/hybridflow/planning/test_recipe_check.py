"""All checks of a recipe together."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.checkpoint.verify import damaged_shard
from hybridflow.planning.recipe_check import check_recipe
from tests.support.resumable import a_recipe, make_checkpoint


def test_a_dry_run_returns_the_resumption_and_reads_shards_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    read: list[Path] = []

    def reads(directory: Path, *, most_bytes: int) -> str | None:
        read.append(directory)
        return damaged_shard(directory, most_bytes=most_bytes)

    monkeypatch.setattr("hybridflow.checkpoint.resume.damaged_shard", reads)
    recipe = a_recipe(tmp_path, "resume=auto")
    assert check_recipe(recipe, dry_run=True) == [f"resume: after step 2, from {checkpoint}"]
    assert read == [checkpoint]
    assert check_recipe(recipe) == []  # the run itself logs it
