"""Reads a sharded checkpoint by several threads, in the format of megatron-core's dist_checkpointing (torch_dist).

Its own loading reads one chunk after another, in the order of the requests.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
from collections.abc import Buffer
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _create_file_view
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksums
from engine3d.checkpoint.manifest import verify_hint
from engine3d.checkpoint.metadata import METADATA, parse_metadata
from engine3d.checkpoint.writing.staging import HostBuffer
from engine3d.errors import DamagedCheckpointError, EngineError, UserError

_THREADS = 16
_STRETCH_BYTES = 128 << 20
"""Bytes of a file that one thread reads: small, so that all threads end at the same time."""

_BEGIN_BYTES = 256 << 20
"""Bytes of each file that are read before they are known to be needed."""

_SCRATCH_BYTES = 8 << 20

_VALUES = "data/0"
"""Name of the values of the only tensor in a file of torch.save."""


class CheckpointReader(FileSystemReader):
    """Reads the chunks of a plan in the order in which they lie in the files, several stretches of files at once.

    Has threads until it is closed, for all plans that are read at a time.

    Args:
        directory: of the role.
        verify: compare every chunk with its checksum. Those of older formats have none.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        super().__init__(directory)
        self._directory = directory
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint")
        self._buffers = _ThreadBuffers()
        self._checksums = ChunkChecksums(directory)
        self._verify = verify

    def __enter__(self) -> CheckpointReader:
        return self

    def begin(self, rank: int) -> None:
        """Read ahead what a rank wrote, while the load is planned."""
        for path in self._directory.glob(f"__{rank}_*"):
            for start in range(0, min(_BEGIN_BYTES, path.stat().st_size), _STRETCH_BYTES):
                self._threads.submit(_read_ahead, path, start)

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    @cached_property
    def metadata(self) -> Metadata:
        """Description of the files' contents. Read once.

        Raises:
            UserError: there is no checkpoint, or its description cannot be read.
        """
        path = self._directory / METADATA
        try:
            return parse_metadata(path.read_bytes(), f"checkpoint {path}:")
        except OSError as error:
            raise UserError(f"checkpoint {path}: cannot be read: {error.strerror}") from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every complete tensor, by key."""
        stored = self.metadata.state_dict_metadata.items()
        return {key: tuple(entry.size) for key, entry in stored if isinstance(entry, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all chunks of a plan into their targets.

        Raises:
            EngineError: a file cannot be read; names it.
        """
        jobs = [
            (name, list(stretch))
            for name, items in groupby(sorted(plan.items, key=self._position), key=lambda item: self._position(item)[0])
            for _, stretch in groupby(items, key=lambda item: self._position(item)[1] // _STRETCH_BYTES)
        ]
        for _ in self._threads.map(lambda job: self._read(job[0], job[1], planner), jobs):
            pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _position(self, item: ReadItem) -> tuple[str, int]:
        stored = self.storage_data[item.storage_index]
        return stored.relative_path, stored.offset

    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        path = self._directory / name
        first, last = self._position(items[0])[1], self.storage_data[items[-1].storage_index]
        try:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), first, last.offset + last.length - first, os.POSIX_FADV_WILLNEED)
                for item in items:
                    self._read_item(file, item, planner, self._buffers.buffer)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error) if isinstance(error, EngineError) else f"cannot be read: {' '.join(str(error).split())}"
            # A file server that does not answer has damaged nothing.
            damaged = not isinstance(error, OSError) or error.errno in (errno.EIO, errno.ENOENT)
            kind = DamagedCheckpointError if damaged else EngineError
            raise kind(f"{path} {reason}; {verify_hint(self._directory.parent)}") from error

    def _read_item(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner, buffer: HostBuffer) -> None:
        stored = self.storage_data[item.storage_index]
        view = _create_file_view(file, stored.offset, stored.length)
        if item.type == LoadItemType.BYTE_IO:
            data = view.read(-1)
            self._compare(item, data)
            planner.load_bytes(item, io.BytesIO(data))
            return
        # Not torch.load, which takes new memory for each chunk, and copies it once more.
        values = buffer.tensor(*self._chunk_layouts[item.storage_index.fqn, item.storage_index.offset])
        archive: Any = torch._C.PyTorchFileReader(cast("IO[bytes]", view))
        first = archive.get_record_offset(_VALUES)
        _read_into(file, stored.offset + first, values)
        if self._verify:
            last = first + values.nbytes
            head = os.pread(file.fileno(), first, stored.offset)
            tail = os.pread(file.fileno(), stored.length - last, stored.offset + last)
            self._compare(item, head, _bytes_of(values), tail)
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(values, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)

    def _compare(self, item: ReadItem, *data: Buffer) -> None:
        """Raise EngineError, whose text continues after the name of the file, unless a chunk is what was saved."""
        stored = self.storage_data[item.storage_index]
        if not self._verify or not self._checksums.covers(stored.relative_path):
            return
        if reason := self._checksums.compare(stored.relative_path, stored.offset, data):
            raise EngineError(f"{reason} ({item.storage_index.fqn})")

    @cached_property
    def _chunk_layouts(self) -> dict[tuple[str, torch.Size | None], tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every chunk of a tensor in the files, by key and offset."""
        return {
            (key, chunk.offsets): (chunk.sizes, entry.properties.dtype)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }


class _ThreadBuffers(threading.local):
    """The host memory of each thread."""

    def __init__(self) -> None:
        self.buffer = HostBuffer()


def _read_ahead(path: Path, start: int) -> None:
    """Bring a stretch of a file into the system's cache. Linux reads but a few megabytes of what it is advised of."""
    scratch = bytearray(_SCRATCH_BYTES)
    with path.open("rb", buffering=0) as file:
        for offset in range(start, start + _STRETCH_BYTES, _SCRATCH_BYTES):
            if not os.preadv(file.fileno(), [scratch], offset):
                return


def _read_into(file: io.FileIO, start: int, values: Tensor) -> None:
    """Fill a contiguous tensor in host memory with what lies in a file from byte `start` on."""
    if not values.numel():
        return
    rest = _bytes_of(values)
    while rest:
        count = os.preadv(file.fileno(), [rest], start)
        if not count:
            raise EOFError(f"it ends at byte {start}, {len(rest)} bytes before the end of a chunk")
        rest, start = rest[count:], start + count


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())


class _LoadPlanner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object like Megatron-Core, but without running what a pickle says."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def fill(reader: CheckpointReader, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a sharded state dict in place; the objects of it are returned, by key.

    Raises:
        EngineError: a file cannot be read, or what is read of it is not what was saved.
    """
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(state)
    requested: dict[str, Any] = mcore_to_pyt_state_dict(flat, is_loading=True)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        checkpoint.load(requested, reader, planner=planner, no_dist=True)
    except checkpoint.CheckpointException as error:  # PyTorch's, with the stack of the first one as its message
        cause, _ = next(iter(error.failures.values()))
        raise cause from error
    return requested
