"""What a step has learned from, as the run's store has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from engine3d.errors import UserError, first_line, shortened
from engine3d.input_files import check_regular, parse_json
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_table import batch_of
from hybridflow.config.recipe import Recipe
from hybridflow.trainer.sample_store import BASELINE, FORMAT


@dataclass(frozen=True)
class StepFacts:
    """What a file of the store says of itself.

    Args:
        step: that has learned from the samples.
        version: of the weights that it has made.
        samples: how many there are.
        columns: their names.
    """

    step: int
    version: int
    samples: int
    columns: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> StepFacts:
        """Without the samples.

        Raises:
            UserError: it is no file of a store, or has samples of several updates.
        """
        check_regular(path)
        try:
            file = pq.ParquetFile(path, memory_map=False)
            schema = file.schema_arrow
            facts = parse_json((schema.metadata or {})[b"hybridflow"])
            if facts["format"] != FORMAT:
                raise ValueError(f"its format is {facts['format']}, expected {FORMAT}")
            if len(facts.get("batches", [0])) != 1:
                raise ValueError(f"the step has learned from {len(facts['batches'])} batches, expected one")
            return cls(int(facts["step"]), int(facts["version"]), file.metadata.num_rows, tuple(schema.names))
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise _unreadable(path, error) from None


@dataclass(frozen=True, eq=False)
class StoredStep:
    """The samples of a step.

    Args:
        batch: in the order in which they were learned from, with rewards and costs.
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
            keeps_samples: whether the algorithm learns from samples of earlier steps too.

        Raises:
            UserError: it cannot be read, or holds no samples.
        """
        try:
            table = pq.read_table(path, memory_map=False, partitioning=None)
            batch = batch_of(table)
            groups = batch.group_ids.tolist()
            baselines = table[BASELINE].to_pylist() if BASELINE in table.column_names else []
            own = [name for name in table.column_names if name.startswith(("reward/", "cost/"))]
            found = [_is_there(table[name]) for name in own] if keeps_samples else []
            return cls(
                batch,
                _figures(table["advantage"]),
                {group: value for group, value in zip(groups, baselines, strict=False) if value is not None},
                ~torch.stack(found).any(0) if found else torch.zeros(len(batch), dtype=torch.bool),
                {name: figures for name in own if (figures := _figures(table[name])) is not None},
            )
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise _unreadable(path, error) from None


def all_learned(recipe: Recipe, facts: StepFacts) -> bool:
    """Whether a step has learned from all samples that were drawn for it, and from no others."""
    drawn = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
    algorithm = recipe.algorithm
    filtered = getattr(algorithm, "dynamic_sampling", False) or algorithm.kept_samples
    return algorithm.needs_engines and not filtered and facts.samples == drawn


def _is_there(column: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(column.is_valid().to_numpy().copy())


def _figures(column: pa.ChunkedArray) -> Tensor | None:
    """(B,) float32; None where one is null."""
    return None if column.null_count else torch.from_numpy(column.to_numpy().copy())


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = shortened(" ".join(first_line(error).split()), 160)
    return UserError(f"{path} holds no samples of a step that can be made again: {reason}")
