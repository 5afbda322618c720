"""Saving and loading one model's state: every rank writes and reads its own shard, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.checkpoint.digests.chunks import MAX_CHUNK_BYTES, FlatChunk, flat_chunks
from engine3d.checkpoint.manifest import FileEntry, RoleSummary, StoredAdapters
from engine3d.checkpoint.state import (
    RANDOM_KEY,
    Kind,
    ParameterShard,
    key_of,
    optimizer_step,
    parameter_shards,
    random_states,
    writes,
)
from engine3d.checkpoint.writing.staging import Staging
from engine3d.collectives import all_reduce
from engine3d.errors import EngineError
from engine3d.models.lora.spec import AdapterSpec, target_names
from engine3d.platform import platform

if TYPE_CHECKING:
    from engine3d.checkpoint.reading.load import Loaded
    from engine3d.checkpoint.writing.writer import CheckpointWriter
    from engine3d.training.engine import TrainEngine

_THREADS = 4
_Fetch = Callable[[int, int], Tensor]
"""(offset, length) -> that slice of a flat range."""


@dataclass(frozen=True)
class SaveStart:
    """Cost of the beginning of a save for a rank.

    Args:
        stall_s: seconds during which the rank could do nothing else.
        nbytes: of state that the rank writes.
        host_bytes: of host memory that holds a copy of it.
    """

    stall_s: float
    nbytes: int
    host_bytes: int


@dataclass(frozen=True)
class _Flat:
    """One kind of a parameter shard's state, and its chunks."""

    shard: ParameterShard
    kind: Kind
    chunks: tuple[FlatChunk, ...]

    @property
    def elements(self) -> int:
        return self.shard.stop - self.shard.start

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype(self.kind)


class EngineCheckpoint:
    """One rank's side of saving and loading an engine's state; every rank makes the same calls.

    Args:
        engine: whose state it is.
        threads: files that this rank writes at the same time.
    """

    def __init__(self, engine: TrainEngine, *, threads: int = _THREADS) -> None:
        from engine3d.checkpoint.writing.writer import SaveStrategy  # Megatron-Core is only imported where it runs

        self._engine = engine
        self._strategy = SaveStrategy(threads)
        self._staging = Staging()
        self._structure: tuple[Any, ...] | None = None
        self._planned: tuple[Any, ...] | None = None
        self._flats: list[_Flat] = []
        self._writer: CheckpointWriter | None = None
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._directory = Path()

    @property
    def summary(self) -> RoleSummary:
        """State of this model as a manifest stores it."""
        engine = self._engine
        return RoleSummary(
            layout=str(engine.layout),
            world_size=engine.layout.world_size,
            dtype=engine.config.dtype,
            value_head=engine.value_head,
            parameters=engine.trained.parameter_count(),
            optimizer_step=self._agreed_step() if engine.optimizer is not None else None,
            adapters=self._adapters,
            mtp=engine.trained.mtp,
        )

    @cached_property
    def _adapters(self) -> StoredAdapters | None:
        """Adapters of the model, if it has any."""
        spec = self._engine.trained
        if not isinstance(spec, AdapterSpec) or spec.directory is None:
            return None
        targets = spec.lora.targets or target_names(self._engine.spec)
        return StoredAdapters(spec.lora.rank, spec.lora.alpha, targets, self._engine.base_fingerprint)

    def prepare(self) -> None:
        """Begin to take the host memory that saves in the background need, so that the first need not wait for it.

        To be called after the first optimizer step, which makes the state that is copied there. Once is enough.
        """
        if self._preparing is None:
            sizes = [(flat.elements, flat.dtype) for flat in self._current_flats()]
            self._preparing = threading.Thread(target=self._take, args=[sizes], name="checkpoint-memory", daemon=True)
            self._preparing.start()

    def _take(self, sizes: list[tuple[int, torch.dtype]]) -> None:
        platform.device(self._engine.device.index or 0)  # a thread has none
        with contextlib.suppress(RuntimeError, MemoryError):  # the save tries again, and says so
            self._staging.tensors(sizes)

    def forget(self) -> None:
        """Forget the state of the engine's optimizer, before another replaces it."""
        if self._preparing is not None:
            self._preparing.join()
        self._structure, self._flats = None, []

    def begin(self, directory: Path, *, background: bool) -> SaveStart:
        """Begin to save into a directory that exists and is seen by all ranks.

        With `background` this returns as soon as the state has been copied to host memory, and training may continue.
        Without it no copy is made, and nothing may change until the files are written. In both cases `finish` has to
        follow, once `is_written` on all ranks.

        Raises:
            EngineError: a save is in flight, or a rank does not see the directory or could not copy its state. In the
                second case none is in flight.
        """
        started = time.perf_counter()
        if self._writer is not None:
            raise EngineError(f"save to {directory}: the one to {self._directory} is still in flight")
        step = self._agreed_step()
        try:
            next(directory.iterdir(), None)
            flats = self._current_flats()
            fetch: list[_Fetch] = (
                self._staged(flats) if background else [partial(flat.shard.read, flat.kind) for flat in flats]
            )
        except Exception as error:  # reported to all ranks before it is raised
            self._agree(directory, error, changed=False)
            raise
        changed = self._agree(directory, None, changed=self._structure != self._planned)
        common = {
            "optimizer_step": step,
            "scheduler_steps": self._engine.scheduler.num_steps if self._engine.optimizer is not None else 0,
            "layout": str(self._engine.layout),
            "device": self._engine.device.type,
        }
        if changed:
            self._plan(directory, flats, common)
            self._planned = self._structure
        self._writer = self._strategy.writer(directory, partial(self._data, flats, fetch, common, random_states()))
        self._directory = directory
        self._thread = threading.Thread(target=self._writer.write, name="checkpoint", daemon=True)
        self._thread.start()
        nbytes = sum(chunk.length * flat.dtype.itemsize for flat in flats for chunk in flat.chunks)
        return SaveStart(time.perf_counter() - started, nbytes, self._staging.nbytes if background else 0)

    def is_written(self) -> bool:
        """True once this rank's files are written, or writing them has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> list[FileEntry]:
        """End the save on all ranks.

        Returns:
            This rank's files, with paths relative to the directory; on rank 0 also those that describe all of it.

        Raises:
            EngineError: a rank's files could not be written; names the file and the cause where this is the rank.
        """
        if self._writer is None or self._thread is None:
            raise EngineError("no save is in flight")
        self._thread.join()
        writer, self._writer, self._thread = self._writer, None, None
        self._agree(self._directory, writer.error, changed=False)
        if writer.error is not None:
            raise writer.error
        entries, failed = [], None
        try:
            entries = self._strategy.finish(writer, self._directory)
        except EngineError as error:  # reported to all ranks before it is raised
            failed = error
        self._agree(self._directory, failed, changed=False)
        if failed is not None:
            raise failed
        return entries

    def abandon(self) -> None:
        """Abort the save in flight. No other rank has to agree. The next one is planned again."""
        if self._thread is not None and self._writer is not None:
            self._writer.give_up()
            self._thread.join()
        self._writer, self._thread, self._planned = None, None, None

    def load(self, directory: Path, *, verify: bool = True) -> Loaded:
        """Bring the engine to the state that was saved, of the same or another layout.

        Args:
            directory: of the role in the checkpoint.
            verify: compare every chunk that is read with its checksum.

        Raises:
            UserError: it is the state of another model.
            EngineError: it cannot be read; a DamagedCheckpointError where it is not what was saved.
        """
        from engine3d.checkpoint.reading.load import load_state

        return load_state(self._engine, directory, verify=verify)

    def _current_flats(self) -> list[_Flat]:
        """List what this rank writes, again after the optimizer was replaced or has made its first step."""
        structure = (self._engine.optimizer, optimizer_step(self._engine) > 0)
        if structure != self._structure:
            self._flats = []
            for shard in parameter_shards(self._engine):
                if writes(shard):
                    for kind in shard.kinds():
                        most = MAX_CHUNK_BYTES // shard.dtype(kind).itemsize
                        chunks = tuple(flat_chunks(shard.local, shard.start, shard.stop, most))
                        self._flats.append(_Flat(shard, kind, chunks))
            self._structure = structure
        return self._flats

    def _staged(self, flats: list[_Flat]) -> list[_Fetch]:
        """Copies of all flats in host memory."""
        if self._preparing is not None:
            self._preparing.join()
        buffers = self._staging.tensors((flat.elements, flat.dtype) for flat in flats)
        for flat, buffer in zip(flats, buffers, strict=True):
            buffer.copy_(flat.shard.read(flat.kind, 0, flat.elements), non_blocking=True)
        platform.synchronize()
        return [partial(torch.narrow, buffer, 0) for buffer in buffers]

    def _plan(self, directory: Path, flats: list[_Flat], common: dict[str, Any]) -> None:
        """All ranks plan a save of a new structure together."""
        from engine3d.checkpoint.writing.writer import planned_tensor

        state: dict[str, Any] = dict(common)
        for flat in flats:
            for chunk in flat.chunks:
                key, shape = key_of(flat.kind, chunk.hf_name), self._engine.trained.hf_tensors[chunk.hf_name].shape
                state[str(len(state))] = planned_tensor(key, chunk.box, shape, flat.dtype)
        state[RANDOM_KEY] = _random_object()
        self._strategy.plan(state, directory)

    def _data(
        self, flats: list[_Flat], fetch: list[_Fetch], common: dict[str, Any], randomness: dict[str, Any]
    ) -> dict[Any, Any]:
        """Map the items of the plan to their values."""
        from engine3d.checkpoint.writing.writer import COMMON, index_of, object_index, serialised

        data: dict[Any, Any] = {
            object_index(COMMON): serialised(common),
            object_index(_random_object()): serialised(randomness),
        }
        for flat, source in zip(flats, fetch, strict=True):
            for chunk in flat.chunks:
                data[index_of(key_of(flat.kind, chunk.hf_name), chunk.box)] = partial(_read, source, chunk)
        return data

    def _agree(self, directory: Path, error: Exception | None, *, changed: bool) -> bool:
        """True if the structure changed on any rank. Raises EngineError if another rank failed."""
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (str(error) if error else None, changed))
        failed = [(rank, message) for rank, (message, _) in enumerate(reports) if message]
        if failed and error is None:
            raise EngineError(f"save to {directory}: rank {failed[0][0]} failed: {failed[0][1]}")
        return any(changes for _, changes in reports)

    def _agreed_step(self) -> int:
        """The optimizer's steps. A rank that holds none of its state receives them from the others."""
        step = torch.tensor(optimizer_step(self._engine), device=self._engine.device)
        all_reduce(step, dist.ReduceOp.MAX)
        return int(step)


def _random_object() -> Any:
    from megatron.core.dist_checkpointing import ShardedObject

    return ShardedObject(RANDOM_KEY, None, (dist.get_world_size(),), (dist.get_rank(),))


def _read(source: _Fetch, chunk: FlatChunk) -> Tensor:
    return chunk.view(source(chunk.offset, chunk.length))
