"""A SampleBatch as a safetensors file: every bit of every column comes back."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine3d.errors import UserError
from engine3d.input_files import check_regular
from hybridflow.batch.sample_batch import SampleBatch

_PADDED = "pad_token_id"
"""Metadata of files of padded rows, as checkpoints before format 4 have them."""


def write_batch(path: Path, batch: SampleBatch) -> None:
    """Write all columns of a batch."""
    # Copies, because the format takes no two tensors of one memory.
    save_file({name: column.clone().contiguous() for name, column in batch.columns().items()}, path)


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
