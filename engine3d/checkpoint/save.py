"""Saving and loading one model's state: every rank writes and reads its own part, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.checkpoint.manifest import FileEntry, RoleFacts
from engine3d.checkpoint.pieces import MAX_PIECE_BYTES, FlatPiece, extents, flat_pieces
from engine3d.checkpoint.staging import Staging
from engine3d.checkpoint.state import (
    RANDOM_KEY,
    HeldParameter,
    Kind,
    held_parameters,
    key_of,
    optimizer_step,
    random_states,
    writes,
)
from engine3d.collectives import all_reduce
from engine3d.errors import EngineError
from engine3d.platform import platform

if TYPE_CHECKING:
    from engine3d.checkpoint.load import Loaded
    from engine3d.checkpoint.writer import CheckpointWriter
    from engine3d.training.engine import TrainEngine

_THREADS = 4
_Fetch = Callable[[int, int], Tensor]
"""(offset, length) -> that part of a flat range."""


@dataclass(frozen=True)
class Begun:
    """What the beginning of a save took from a rank.

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
    """A kind of a held parameter, and its pieces."""

    held: HeldParameter
    kind: Kind
    pieces: tuple[FlatPiece, ...]

    @property
    def elements(self) -> int:
        return self.held.stop - self.held.start

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype(self.kind)


class EngineCheckpoint:
    """One rank's side of saving and loading an engine's state; every rank makes the same calls.

    Args:
        engine: whose state it is.
        threads: files that this rank writes at the same time.
    """

    def __init__(self, engine: TrainEngine, *, threads: int = _THREADS) -> None:
        from engine3d.checkpoint.writer import SaveStrategy  # Megatron-Core is only imported where it runs

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
    def facts(self) -> RoleFacts:
        """What a manifest says of this model."""
        engine = self._engine
        return RoleFacts(
            layout=str(engine.layout),
            world_size=engine.layout.world_size,
            dtype=engine.config.dtype,
            value_head=engine.value_head,
            parameters=engine.spec.parameter_count(),
            optimizer_step=self._agreed_step() if engine.optimizer is not None else None,
        )

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
            self._staging.room(sizes)

    def forget(self) -> None:
        """The engine's optimizer is going to be another: let go of the state of the one before."""
        if self._preparing is not None:
            self._preparing.join()
        self._structure, self._flats = None, []

    def begin(self, directory: Path, *, background: bool) -> Begun:
        """Begin to save into a directory that exists and is seen by all ranks.

        With `background` this returns as soon as the state has been copied to host memory: training may go on. Without
        it no copy is made, and nothing may change until the files are written. In both cases `finish` has to follow,
        once `is_written` on all ranks.

        Raises:
            EngineError: a save is under way, or a rank does not see the directory or could not copy its state; then
                none is under way.
        """
        started = time.perf_counter()
        if self._writer is not None:
            raise EngineError(f"save to {directory}: the one to {self._directory} is still under way")
        step = self._agreed_step()
        try:
            next(directory.iterdir(), None)
            flats = self._current_flats()
            fetch: list[_Fetch] = (
                self._staged(flats) if background else [partial(flat.held.read, flat.kind) for flat in flats]
            )
        except Exception as error:  # told to all ranks before it is raised
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
        nbytes = sum(piece.length * flat.dtype.itemsize for flat in flats for piece in flat.pieces)
        return Begun(time.perf_counter() - started, nbytes, self._staging.nbytes if background else 0)

    def is_written(self) -> bool:
        """Whether this rank's files are written, or writing them has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> list[FileEntry]:
        """End the save on all ranks.

        Returns:
            This rank's files, with paths relative to the directory; on rank 0 also those that describe the whole.

        Raises:
            EngineError: a rank's files could not be written; names the file and the cause where this is the rank.
        """
        if self._writer is None or self._thread is None:
            raise EngineError("no save is under way")
        self._thread.join()
        writer, self._writer, self._thread = self._writer, None, None
        self._agree(self._directory, writer.error, changed=False)
        if writer.error is not None:
            raise writer.error
        entries, failed = [], None
        try:
            entries = self._strategy.finish(writer, self._directory)
        except EngineError as error:  # told to all ranks before it is raised
            failed = error
        self._agree(self._directory, failed, changed=False)
        if failed is not None:
            raise failed
        return entries

    def abandon(self) -> None:
        """Give up the save that is under way; no other rank has to agree. The next one is planned afresh."""
        if self._thread is not None and self._writer is not None:
            self._writer.give_up()
            self._thread.join()
        self._writer, self._thread, self._planned = None, None, None

    def load(self, directory: Path, *, verify: bool = True) -> Loaded:
        """Bring the engine to the state that was saved, of the same or another layout.

        Args:
            directory: of the role in the checkpoint.
            verify: compare every piece that is read with its checksum.

        Raises:
            UserError: it is the state of another model.
            EngineError: it cannot be read; a DamagedCheckpointError where it is not what was saved.
        """
        from engine3d.checkpoint.load import load_state

        return load_state(self._engine, directory, verify=verify)

    def _current_flats(self) -> list[_Flat]:
        """What this rank writes, found again when the optimizer is another or has made its first step."""
        structure = (self._engine.optimizer, optimizer_step(self._engine) > 0)
        if structure != self._structure:
            self._flats = []
            for held in held_parameters(self._engine):
                if writes(held):
                    for kind in held.kinds():
                        most = MAX_PIECE_BYTES // held.dtype(kind).itemsize
                        pieces = tuple(flat_pieces(held.local, held.start, held.stop, most))
                        self._flats.append(_Flat(held, kind, pieces))
            self._structure = structure
        return self._flats

    def _staged(self, flats: list[_Flat]) -> list[_Fetch]:
        """Copies of all flats in host memory."""
        if self._preparing is not None:
            self._preparing.join()
        rooms = self._staging.room((flat.elements, flat.dtype) for flat in flats)
        for flat, room in zip(flats, rooms, strict=True):
            room.copy_(flat.held.read(flat.kind, 0, flat.elements), non_blocking=True)
        platform.synchronize()
        return [partial(torch.narrow, room, 0) for room in rooms]

    def _plan(self, directory: Path, flats: list[_Flat], common: dict[str, Any]) -> None:
        """All ranks plan a save of a new structure together."""
        from engine3d.checkpoint.writer import planned_tensor

        state: dict[str, Any] = dict(common)
        for flat in flats:
            for piece in flat.pieces:
                key, shape = key_of(flat.kind, piece.hf_name), self._engine.spec.hf_tensors[piece.hf_name].shape
                state[str(len(state))] = planned_tensor(key, piece.box, shape, flat.dtype)
        state[RANDOM_KEY] = _random_object()
        self._strategy.plan(state, directory)

    def _data(
        self, flats: list[_Flat], fetch: list[_Fetch], common: dict[str, Any], randomness: dict[str, Any]
    ) -> dict[Any, Any]:
        """What the items of the plan are."""
        from engine3d.checkpoint.writer import COMMON, index_of, object_index, serialised

        data: dict[Any, Any] = {
            object_index(COMMON): serialised(common),
            object_index(_random_object()): serialised(randomness),
        }
        for flat, source in zip(flats, fetch, strict=True):
            for piece in flat.pieces:
                data[index_of(key_of(flat.kind, piece.hf_name), piece.box)] = partial(_read, source, piece)
        return data

    def _agree(self, directory: Path, error: Exception | None, *, changed: bool) -> bool:
        """Whether the structure changed on any rank; EngineError if this went wrong on another one."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (str(error) if error else None, changed))
        failed = [(rank, message) for rank, (message, _) in enumerate(found) if message]
        if failed and error is None:
            raise EngineError(f"save to {directory}: rank {failed[0][0]} failed: {failed[0][1]}")
        return any(changes for _, changes in found)

    def _agreed_step(self) -> int:
        """The optimizer's steps; a rank that holds none of its state hears it from the others."""
        step = torch.tensor(optimizer_step(self._engine), device=self._engine.device)
        all_reduce(step, dist.ReduceOp.MAX)
        return int(step)


def _random_object() -> Any:
    from megatron.core.dist_checkpointing import ShardedObject

    return ShardedObject(RANDOM_KEY, None, (dist.get_world_size(),), (dist.get_rank(),))


def _read(source: _Fetch, piece: FlatPiece) -> Tensor:
    return source(piece.offset, piece.length).view(extents(piece.box))
