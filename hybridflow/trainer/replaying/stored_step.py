"""The samples that a step has trained on, as the run's store has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from engine3d.errors import UserError, first_line, shortened
from engine3d.input_files import check_regular, parse_json
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_table import batch_of
from hybridflow.trainer.samples.store import BASELINE, FORMAT


@dataclass(frozen=True)
class StepMetadata:
    """Metadata of a file of the store.

    Args:
        step: that has trained on the samples.
        version: of the weights that it has made.
        samples: how many there are.
        columns: their names.
    """

    step: int
    version: int
    samples: int
    columns: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> StepMetadata:
        """Without the samples.

        Raises:
            UserError: it is no file of a store, or has samples of several updates.
        """
        check_regular(path)
        try:
            file = pq.ParquetFile(path, memory_map=False)
            schema = file.schema_arrow
            metadata = parse_json((schema.metadata or {})[b"hybridflow"])
            if metadata["format"] != FORMAT:
                raise ValueError(f"its format is {metadata['format']}, expected {FORMAT}")
            if len(metadata.get("batches", [0])) != 1:
                raise ValueError(f"the step has trained on {len(metadata['batches'])} batches, expected one")
            return cls(int(metadata["step"]), int(metadata["version"]), file.metadata.num_rows, tuple(schema.names))
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise _unreadable(path, error) from None


@dataclass(frozen=True, eq=False)
class StoredStep:
    """The samples of a step.

    Args:
        batch: in the order in which they were trained on, with rewards and costs.
        advantages: (B,) float32 of samples whose tokens share one; None where tokens have their own.
        baselines: what rewards were compared with, by group, where that is no reward of the group's samples.
        recalled: (B,) bool: those that an algorithm has kept from an earlier step.
        by_name: (B,) float32 that each function and scoring model has given, such as "reward/exact" and "reward/model";
            of those alone that have a figure of every sample.
    """

    batch: SampleBatch
    advantages: Tensor | None
    baselines: dict[int, float]
    recalled: Tensor
    by_name: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path, *, keeps_samples: bool) -> StoredStep:
        """All of a file.

        Args:
            path: of the file.
            keeps_samples: true if the algorithm trains on samples of earlier steps too.

        Raises:
            UserError: it cannot be read, or holds no samples.
        """
        try:
            table = pq.read_table(path, memory_map=False, partitioning=None)
            batch = batch_of(table)
            groups = batch.group_ids.tolist()
            baselines = table[BASELINE].to_pylist() if BASELINE in table.column_names else []
            scores = [name for name in table.column_names if name.startswith(("reward/", "cost/"))]
            scored = [_is_there(table[name]) for name in scores] if keeps_samples else []
            return cls(
                batch,
                _floats(table["advantage"]),
                {group: value for group, value in zip(groups, baselines, strict=False) if value is not None},
                ~torch.stack(scored).any(0) if scored else torch.zeros(len(batch), dtype=torch.bool),
                {name: column for name in scores if (column := _floats(table[name])) is not None},
            )
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise _unreadable(path, error) from None


def all_learned(algorithm: AlgorithmSettings, drawn: int, stored: StepMetadata) -> bool:
    """True if a step has trained on all samples that were drawn for it, and on no others."""
    filtered = getattr(algorithm, "dynamic_sampling", False) or algorithm.kept_samples
    return algorithm.needs_engines and not filtered and stored.samples == drawn


def _is_there(column: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(column.is_valid().to_numpy().copy())


def _floats(column: pa.ChunkedArray) -> Tensor | None:
    """(B,) float32; None where one is null."""
    return None if column.null_count else torch.from_numpy(column.to_numpy().copy())


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = shortened(" ".join(first_line(error).split()), 160)
    return UserError(f"{path} holds no samples of a step that can be made again: {reason}")
