"""Loading a state into an engine of any layout: every rank reads the chunks that overlap what it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.checkpoint.digests.chunks import MAX_CHUNK_BYTES, flat_chunks
from engine3d.checkpoint.metadata import difference
from engine3d.checkpoint.state import (
    COMMON_KEY,
    MOMENTS,
    RANDOM_KEY,
    Kind,
    ParameterShard,
    allocate_moments,
    key_of,
    parameter_shards,
    set_optimizer_step,
    set_random_states,
)
from engine3d.errors import DamagedCheckpointError, EngineError, UserError

if TYPE_CHECKING:
    from engine3d.checkpoint.reading.reader import CheckpointReader
    from engine3d.training.engine import TrainEngine

_BATCH_BYTES = 2 << 30
_BATCHES = 2
"""Batches of weights in flight. They bound the memory that loading takes next to the model. While one batch is read,
the next is planned, so that the disk is never idle.
"""


@dataclass(frozen=True)
class Loaded:
    """Result of a load.

    Args:
        optimizer_step: the optimizer's steps so far; None where the checkpoint has weights alone, and the optimizer
            starts from zero.
        same_layout: true if the layout is the one that was saved. Every rank then resumes its random states too,
            if it has the same kind of device.
    """

    optimizer_step: int | None
    same_layout: bool


def load_state(engine: TrainEngine, directory: Path, *, verify: bool = True) -> Loaded:
    """Bring an engine to a saved state; every rank calls this. See `EngineCheckpoint.load`."""
    from engine3d.checkpoint.reading.reader import CheckpointReader

    with CheckpointReader(directory, verify=verify) as reader:
        reader.begin(dist.get_rank())
        return _load(engine, directory, reader)


def _load(engine: TrainEngine, directory: Path, reader: CheckpointReader) -> Loaded:
    try:
        common, has_moments = _read(engine, directory, reader)
    except EngineError as error:  # reported to all ranks before it is raised: they would wait for this one
        _agree(directory, error)
        raise
    _agree(directory, None)
    if engine.optimizer is not None:
        for chunk in engine.gradient_chunks:
            chunk.start_param_sync(force_sync=True)
        if has_moments:
            set_optimizer_step(engine, common["optimizer_step"])
        for scheduler in engine.schedulers:
            scheduler.num_steps = common["scheduler_steps"]
            scheduler.step(0)
    same_layout = common["layout"] == str(engine.layout)
    if same_layout and common["device"] == engine.device.type:
        set_random_states(_object(reader, RANDOM_KEY, dist.get_world_size(), dist.get_rank()))
    return Loaded(common["optimizer_step"] if has_moments else None, same_layout)


def _agree(directory: Path, error: EngineError | None) -> None:
    """Raise EngineError, damage as such, where another rank could not read what it holds."""
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (str(error), isinstance(error, DamagedCheckpointError)) if error else None)
    failed = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    if failed and error is None:
        rank, message, damaged = failed[0]
        raise (DamagedCheckpointError if damaged else EngineError)(f"load of {directory}: rank {rank}: {message}")


def _read(engine: TrainEngine, directory: Path, reader: CheckpointReader) -> tuple[dict[str, Any], bool]:
    """Read what this rank holds. What belongs to no tensor, and whether the optimizer's moments were saved."""
    stored = reader.shapes
    check_stored(directory, engine, stored)
    common = _object(reader, COMMON_KEY, 1, 0)
    has_moments = any(name.startswith("exp_avg/") for name in stored)
    shards = parameter_shards(engine)
    if engine.optimizer is not None and has_moments:
        engine.make_optimizer_state(partial(allocate_moments, step=common["optimizer_step"]))
    if engine.host_state is not None:
        engine.host_state.changes()
    kinds: tuple[Kind, ...] = ("weight", *MOMENTS) if has_moments else ("weight",)
    with ThreadPoolExecutor(_BATCHES, thread_name_prefix="batch") as pool:
        for _ in pool.map(lambda batch: _load_batch(reader, engine, batch, kinds), _batches(shards)):
            pass
    return common, has_moments


def check_stored(directory: Path, engine: TrainEngine, stored: dict[str, tuple[int, ...]]) -> None:
    """Refuse the state of another model.

    Raises:
        UserError: names a tensor that is missing or has another shape.
    """
    weights = {key.removeprefix("weight/"): shape for key, shape in stored.items() if key.startswith("weight/")}
    if mismatch := difference(engine.trained, weights):
        raise UserError(f"checkpoint {directory} is not of this model: {mismatch}")


def _batches(shards: Collection[ParameterShard]) -> Iterator[list[ParameterShard]]:
    batch: list[ParameterShard] = []
    size = 0
    for shard in shards:
        nbytes = 4 * (shard.stop - shard.start)
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(shard)
        size += nbytes
    if batch:
        yield batch


def _load_batch(
    reader: CheckpointReader, engine: TrainEngine, batch: list[ParameterShard], kinds: tuple[Kind, ...]
) -> None:
    from engine3d.checkpoint.reading.reader import fill
    from engine3d.checkpoint.writing.writer import sharded_tensor

    state: dict[str, Any] = {}
    weights: list[tuple[ParameterShard, Tensor]] = []
    for shard in batch:
        for kind in kinds if shard.optimizer is not None else ("weight",):
            target = shard.target(kind)
            most = MAX_CHUNK_BYTES // target.element_size()
            chunks = list(flat_chunks(shard.local, shard.start, shard.stop, most))
            if sum(chunk.length for chunk in chunks) < target.numel():
                target.zero_()  # rows that pad the vocabulary
            if kind == "weight":
                weights.append((shard, target))
            for chunk in chunks:
                values = chunk.view(target[chunk.offset : chunk.offset + chunk.length])
                shape = engine.trained.hf_tensors[chunk.hf_name].shape
                state[str(len(state))] = sharded_tensor(key_of(kind, chunk.hf_name), values, chunk.box, shape)
    with torch.no_grad():
        if state:
            fill(reader, state)
        for shard, weight in weights:
            shard.accept(weight)


def _object(reader: CheckpointReader, key: str, count: int, index: int) -> Any:
    """Read the object of one of `count` ranks, which belongs to no tensor."""
    from megatron.core.dist_checkpointing import ShardedObject

    from engine3d.checkpoint.reading.reader import fill

    described = ShardedObject(key, None, (count,), (index,))
    [value] = fill(reader, {key: described})[described.unique_key]
    return value
