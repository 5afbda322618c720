"""A RolloutBatch as a safetensors file: every bit of every column comes back."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine3d.errors import UserError
from engine3d.input_files import check_regular
from hybridflow.batch.rollout_batch import RolloutBatch

_PAD_TOKEN = "pad_token_id"


def write_batch(path: Path, batch: RolloutBatch) -> None:
    """Write all columns of a batch, and the pad token as metadata."""
    # Copies, because the format takes no two tensors of one memory.
    columns = {name: column.detach().cpu().clone().contiguous() for name, column in batch.columns().items()}
    save_file(columns, path, metadata={_PAD_TOKEN: str(batch.pad_token_id)})


def read_batch(path: Path) -> RolloutBatch:
    """The batch that `write_batch` wrote.

    Raises:
        UserError: no such file, or not one of a batch.
    """
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return RolloutBatch(**columns, pad_token_id=int(file.metadata()[_PAD_TOKEN]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no rollout batch: {' '.join(str(error).split())}") from None
