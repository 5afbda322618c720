"""Difference between two checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from engine3d.checkpoint.manifest import step_directory, write_manifest
from engine3d.checkpoint.reading.compare import SavedTensors, compare_checkpoints
from engine3d.errors import UserError
from tests.support.small_checkpoints import FACTS, describe


def saved(root: Path, step: int, tensors: Mapping[str, Tensor]) -> Path:
    directory = step_directory(root, step)
    writer = torch_checkpoint.FileSystemWriter(directory / "actor", single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this process is alone
        torch_checkpoint.save({**tensors, "common": {"step": step}}, storage_writer=writer, no_dist=True)
    write_manifest(directory, describe(directory, step, roles={"actor": FACTS}))
    return directory


def test_differences_are_found_and_measured_against_what_has_changed(tmp_path: Path) -> None:
    before = {"weight/a": torch.zeros(4, 2), "weight/b": torch.zeros(3), "exp_avg/a": torch.zeros(4, 2)}
    after = {name: tensor + 1 for name, tensor in before.items()}
    other = {name: tensor.clone() for name, tensor in after.items()}
    other["weight/b"][1] += 0.25
    other["exp_avg/a"][0, 0] = 5
    base, one, two = (
        saved(tmp_path / name, 1, tensors) for name, tensors in (("base", before), ("one", after), ("two", other))
    )
    same = compare_checkpoints(one, one, "actor", before=base)
    assert (same.tensors, same.differing, same.largest, same.of_change) == (3, (), 0.0, 0.0)
    compared = compare_checkpoints(one, two, "actor", before=base)
    assert sorted(compared.differing) == ["exp_avg/a", "weight/b"]
    assert (compared.largest, compared.largest_in) == (0.25, "weight/b")
    assert compared.of_change == pytest.approx(0.25 / 11**0.5)
    assert torch.equal(SavedTensors(two, "actor").read("weight/b"), other["weight/b"])


def test_other_models_and_roles_are_refused(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", 1, {"weight/a": torch.zeros(4)})
    two = saved(tmp_path / "two", 1, {"weight/a": torch.zeros(5)})
    with pytest.raises(UserError, match="differ in weight/a, expected the same model"):
        compare_checkpoints(one, two, "actor")
    with pytest.raises(UserError, match="has no critic, only actor"):
        compare_checkpoints(one, one, "critic")
