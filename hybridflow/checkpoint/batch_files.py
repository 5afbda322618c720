"""A SampleBatch as a safetensors file: every bit of every column comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from engine3d.errors import EngineError, UserError
from engine3d.input_files import check_regular
from hybridflow.batch.sample_batch import SampleBatch

if TYPE_CHECKING:
    from torch import Tensor

_PADDED = "pad_token_id"
"""Metadata of files of padded rows, as checkpoints before format 4 have them."""


def write_batch(path: Path, batch: SampleBatch) -> None:
    """Write all columns of a batch."""
    write_tensors(path, batch.columns())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors. Raises EngineError where the disk does not take it."""
    from safetensors.torch import save_file  # imports torch

    # Copies, because the format takes no two tensors of one memory.
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(copies, path)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"cannot write {path}: {' '.join(str(error).split())}") from None


def read_batch(path: Path) -> SampleBatch:
    """The batch that `write_batch` wrote, or the same samples of a file of padded rows.

    Raises:
        UserError: no such file, or not one of a batch.
    """
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            padded = _PADDED in (file.metadata() or {})
        return SampleBatch.from_padded(columns) if padded else SampleBatch(**columns)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path} holds no rollout batch: {' '.join(str(error).split())}") from None
