"""Errors of the system that name their file, which those of writes do not."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine3d.durable import naming
from engine3d.models.files.safetensors_files import ExportFiles, plan_export
from hybridflow.cli.common.outcome import system_error_text
from hybridflow.rundir.atomic_files import AppendedFile, replace_file
from hybridflow.rundir.samples.files import replacing


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """Keep this process from writing any byte to a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append(path: Path) -> None:
    AppendedFile(path).add("a line\n")


def replace_binary(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"1")


def export(path: Path) -> None:
    plan = plan_export({"a": (1,)}, torch.float32, 1 << 20)
    ExportFiles(plan, path.parent).create()


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (append, "metrics.jsonl"),
        (lambda path: replace_file(path, "text"), "report.html"),
        (replace_binary, "step-1.parquet"),
        (export, "model.safetensors"),
    ],
)
def test_a_write_that_fails_names_its_file(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    with pytest.raises(OSError, match="File too large") as error, no_file_may_grow():
        write(tmp_path / name)
    assert system_error_text(error.value) == f"{tmp_path / name}: File too large"


def test_a_name_that_is_there_stays(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error, naming(tmp_path):
        (tmp_path / "none").read_text()
    assert system_error_text(error.value) == f"{tmp_path}/none: No such file or directory"
    assert system_error_text(OSError(24, "Too many open files")) == "the operating system: Too many open files"
