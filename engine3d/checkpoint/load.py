"""Loading a state into an engine of any layout: every rank reads the pieces that overlap what it holds."""

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

from engine3d.checkpoint.metadata import difference
from engine3d.checkpoint.pieces import MAX_PIECE_BYTES, extents, flat_pieces
from engine3d.checkpoint.state import (
    COMMON_KEY,
    MOMENTS,
    RANDOM_KEY,
    HeldParameter,
    Kind,
    allocate_moments,
    held_parameters,
    key_of,
    set_optimizer_step,
    set_random_states,
)
from engine3d.errors import DamagedCheckpointError, EngineError, UserError

if TYPE_CHECKING:
    from engine3d.checkpoint.reader import CheckpointReader
    from engine3d.training.engine import TrainEngine

_BATCH_BYTES = 2 << 30
_BATCHES = 2
"""Of the weights that are read at a time; what is held beside the model while loading is bounded by these. While one
batch is read, the next is planned, so that the disk is never idle."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Args:
        optimizer_step: the optimizer's steps so far; None where the checkpoint has weights alone, and the optimizer
            starts afresh.
        same_layout: whether the layout is the one that was saved. Every rank then goes on with its random states too,
            if it has the same kind of device.
    """

    optimizer_step: int | None
    same_layout: bool


def load_state(engine: TrainEngine, directory: Path, *, verify: bool = True) -> Loaded:
    """Bring an engine to a saved state; every rank calls this. See `EngineCheckpoint.load`."""
    from engine3d.checkpoint.reader import CheckpointReader

    with CheckpointReader(directory, verify=verify) as reader:
        reader.begin(dist.get_rank())
        return _load(engine, directory, reader)


def _load(engine: TrainEngine, directory: Path, reader: CheckpointReader) -> Loaded:
    try:
        common, has_moments = _read(engine, directory, reader)
    except EngineError as error:  # told to all ranks before it is raised: they would wait for this one
        _agree(directory, error)
        raise
    _agree(directory, None)
    if engine.optimizer is not None:
        engine.model.start_param_sync(force_sync=True)
        if has_moments:
            set_optimizer_step(engine, common["optimizer_step"])
        engine.scheduler.num_steps = common["scheduler_steps"]
        engine.scheduler.step(0)
    same_layout = common["layout"] == str(engine.layout)
    if same_layout and common["device"] == engine.device.type:
        set_random_states(_object(reader, RANDOM_KEY, dist.get_world_size(), dist.get_rank()))
    return Loaded(common["optimizer_step"] if has_moments else None, same_layout)


def _agree(directory: Path, error: EngineError | None) -> None:
    """Raise EngineError, damage as such, where another rank could not read what it holds."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (str(error), isinstance(error, DamagedCheckpointError)) if error else None)
    failed = [(rank, *each) for rank, each in enumerate(found) if each is not None]
    if failed and error is None:
        rank, message, damaged = failed[0]
        raise (DamagedCheckpointError if damaged else EngineError)(f"load of {directory}: rank {rank}: {message}")


def _read(engine: TrainEngine, directory: Path, reader: CheckpointReader) -> tuple[dict[str, Any], bool]:
    """Read what this rank holds. What belongs to no tensor, and whether the optimizer's moments were saved."""
    stored = reader.shapes
    check_stored(directory, engine, stored)
    common = _object(reader, COMMON_KEY, 1, 0)
    has_moments = any(name.startswith("exp_avg/") for name in stored)
    held = held_parameters(engine)
    if engine.optimizer is not None and has_moments:
        engine.make_optimizer_state(partial(allocate_moments, step=common["optimizer_step"]))
    if engine.host_state is not None:
        engine.host_state.changes()
    kinds: tuple[Kind, ...] = ("weight", *MOMENTS) if has_moments else ("weight",)
    with ThreadPoolExecutor(_BATCHES, thread_name_prefix="batch") as pool:
        for _ in pool.map(lambda batch: _load_batch(reader, engine, batch, kinds), _batches(held)):
            pass
    return common, has_moments


def check_stored(directory: Path, engine: TrainEngine, stored: dict[str, tuple[int, ...]]) -> None:
    """Refuse the state of another model.

    Raises:
        UserError: names a tensor that is missing or has another shape.
    """
    weights = {key.removeprefix("weight/"): shape for key, shape in stored.items() if key.startswith("weight/")}
    if found := difference(engine.spec, weights):
        raise UserError(f"checkpoint {directory} is not of this model: {found}")


def _batches(held: Collection[HeldParameter]) -> Iterator[list[HeldParameter]]:
    batch: list[HeldParameter] = []
    size = 0
    for each in held:
        nbytes = 4 * (each.stop - each.start)
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += nbytes
    if batch:
        yield batch


def _load_batch(
    reader: CheckpointReader, engine: TrainEngine, batch: list[HeldParameter], kinds: tuple[Kind, ...]
) -> None:
    from engine3d.checkpoint.reader import fill
    from engine3d.checkpoint.writer import sharded_tensor

    state: dict[str, Any] = {}
    weights: list[tuple[HeldParameter, Tensor]] = []
    for held in batch:
        for kind in kinds if held.optimizer is not None else ("weight",):
            target = held.target(kind)
            most = MAX_PIECE_BYTES // target.element_size()
            pieces = list(flat_pieces(held.local, held.start, held.stop, most))
            if sum(piece.length for piece in pieces) < target.numel():
                target.zero_()  # rows that pad the vocabulary
            if kind == "weight":
                weights.append((held, target))
            for piece in pieces:
                values = target[piece.offset : piece.offset + piece.length].view(extents(piece.box))
                shape = engine.spec.hf_tensors[piece.hf_name].shape
                state[str(len(state))] = sharded_tensor(key_of(kind, piece.hf_name), values, piece.box, shape)
    with torch.no_grad():
        if state:
            fill(reader, state)
        for held, weight in weights:
            held.accept(weight)


def _object(reader: CheckpointReader, key: str, count: int, index: int) -> Any:
    """What belongs to no tensor: the object of one of `count` ranks."""
    from megatron.core.dist_checkpointing import ShardedObject

    from engine3d.checkpoint.reader import fill

    described = ShardedObject(key, None, (count,), (index,))
    [value] = fill(reader, {key: described})[described.unique_key]
    return value
