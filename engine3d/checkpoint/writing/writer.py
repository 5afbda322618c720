"""Files of a sharded checkpoint, in the format of megatron-core's dist_checkpointing (torch_dist).

Megatron-Core plans and describes them; they are written here, by threads, with a checksum of all that passes, and
from host memory that is kept from save to save. (Its own writer starts a process for the results of each rank, takes
new host memory at every save, and gives no checksums.)
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing import save as dist_save
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksum, checksum_file, checksum_text
from engine3d.checkpoint.digests.chunks import MAX_CHUNK_BYTES, extents
from engine3d.checkpoint.manifest import FileEntry, Hash, file_entry
from engine3d.checkpoint.state import COMMON_KEY
from engine3d.checkpoint.writing.staging import HostBuffer
from engine3d.cleaning import cleaning
from engine3d.errors import EngineError
from engine3d.models.rules import Box
from engine3d.platform import platform

COMMON_FILES = (".metadata", "metadata.json")
"""Files that rank 0 writes next to the ranks' own."""

COMMON = ShardedObject(COMMON_KEY, None, (1,), (0,))
"""Description of what belongs to no tensor, for dist_checkpointing."""

_BUFFER_BYTES = 64 << 10
_WRITEBACK_BYTES = 32 << 20

Data = Callable[[], Tensor] | io.BytesIO
"""Source of one chunk's values on any device, called when it is written. Or a serialised object."""


class SaveAborted(EngineError):
    """The save was aborted while its files were being written."""


class CheckpointWriter(FileSystemWriterAsync):
    """Writes this rank's items of a plan into `threads` files.

    Args:
        directory: exists.
        threads: files of this rank, each written by a thread of its own.
        plan: what is to be written; None for one that only plans.
        data: called when the writing begins, says what the items of the plan are.
    """

    def __init__(
        self,
        directory: Path,
        threads: int,
        plan: SavePlan | None = None,
        data: Callable[[], Mapping[MetadataIndex, Data]] = dict,
    ) -> None:
        super().__init__(directory, thread_count=threads)
        self._directory, self._plan, self._data = directory, plan, data
        self._rank = dist.get_rank()  # while its group is there
        self._results: list[WriteResult] = []
        self._error: Exception | None = None
        self._given_up = threading.Event()
        self.entries: list[FileEntry] = []
        """Of the files that were written, with paths relative to the directory."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """A plan is made of shapes alone: there is nothing to prepare."""

    def write(self) -> None:
        """Write all files. `error` is None if all went well."""
        prefix = f"__{self._rank}_"
        jobs: list[tuple[str, list[tuple[WriteItem, Data]]]] = []
        try:
            jobs = [(f"{prefix}{number}.distcp", items) for number, items in enumerate(self._items_by_file()) if items]
            checksums: dict[str, list[ChunkChecksum]] = {}
            with _no_zip_checksums(), ThreadPoolExecutor(max(1, len(jobs)), thread_name_prefix="checkpoint") as pool:
                for results, entry, chunks in pool.map(lambda job: self._write_file(*job), jobs):
                    self._results += results
                    self.entries.append(entry)
                    checksums[entry.path] = chunks
            self.entries.append(self._write_checksums(checksums))
        except Exception as error:  # for the thread that waits for this one
            # A full disk must not stay full until somebody asks.
            for name in (*(name for name, _ in jobs), checksum_file(self._rank)):
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
            self._error = error

    def give_up(self) -> None:
        """Stop the threads before their next chunk."""
        self._given_up.set()

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def results(self) -> list[WriteResult]:
        """Position in the files of each item of the plan."""
        return self._results

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is. A directory that has vanished is not made again."""
        return plan

    def _items_by_file(self) -> list[list[tuple[WriteItem, Data]]]:
        """The items for each file: the largest first, each to the file that has the least so far.

        In the order of the plan, in which they will be read too.
        """
        assert self._plan is not None
        data, items = self._data(), self._plan.items
        files: list[list[int]] = [[] for _ in range(self.thread_count)]
        sizes = [0] * self.thread_count
        for index in sorted(range(len(items)), key=lambda index: -_bytes(items[index])):
            least = sizes.index(min(sizes))
            files[least].append(index)
            sizes[least] += _bytes(items[index])
        return [[(items[index], data[items[index].index]) for index in sorted(indices)] for indices in files]

    def _write_checksums(self, chunks: Mapping[str, list[ChunkChecksum]]) -> FileEntry:
        name = checksum_file(self._rank)
        with HashedFile(self._directory / name) as file:
            file.write(checksum_text(chunks))
            file.sync()
            return FileEntry(name, file.size, file.checksum)

    def _write_file(
        self, name: str, items: list[tuple[WriteItem, Data]]
    ) -> tuple[list[WriteResult], FileEntry, list[ChunkChecksum]]:
        path = self._directory / name
        results, chunks = [], []
        buffer = HostBuffer()
        with HashedFile(path) as file:
            for item, data in items:
                if self._given_up.is_set():
                    raise SaveAborted(f"save to {self._directory} was aborted")
                start = file.begin_chunk()
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    _save_tensor(buffer.copy_of(data()), file)
                chunks.append(file.end_chunk())
                length = file.size - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.sync()
            return results, FileEntry(name, file.size, file.checksum), chunks


class HashedFile(io.RawIOBase):
    """A new file, written from beginning to end, and the checksums of all that was written and of its chunks."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError where the file cannot be made."""
        self._path, self._size, self._started = path, 0, 0
        self.error: EngineError | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise EngineError(f"cannot write {path}: {error.strerror}") from error
        self._hash = Hash()
        self._chunk, self._chunk_start = Hash(), 0

    def begin_chunk(self) -> int:
        """Begin a chunk. Returns its first byte."""
        self._chunk, self._chunk_start = Hash(), self._size
        return self._size

    def end_chunk(self) -> ChunkChecksum:
        """End the chunk. Returns its checksum."""
        return ChunkChecksum(self._chunk_start, self._size - self._chunk_start, self._chunk.checksum())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`.

        Raises:
            EngineError: names the file, and why it could not be written.
        """
        rest = memoryview(data).cast("B")
        size = len(rest)
        self._hash.update(rest)
        self._chunk.update(rest)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self.error = EngineError(f"cannot write {self._path}: {error.strerror} after {self._size} bytes")
            raise self.error from error
        self._size += size
        if self._size - self._started >= _WRITEBACK_BYTES:
            self._start_writing()
        return size

    def _start_writing(self) -> None:
        """Start writing to the disk. The kernel by itself waits until a tenth of the host's memory is dirty."""
        os.posix_fadvise(self._file, self._started, self._size - self._started, os.POSIX_FADV_DONTNEED)
        self._started = self._size

    @property
    def size(self) -> int:
        return self._size

    def sync(self) -> None:
        """Make what was written durable; EngineError where that fails."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise EngineError(f"cannot write {self._path}: {error.strerror}") from error

    @property
    def checksum(self) -> str:
        return self._hash.checksum()

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class SaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's planning for `CheckpointWriter`. The plan is kept for saves of the same structure."""

    def __init__(self, threads: int) -> None:
        super().__init__(thread_count=threads)
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._wrapper: Any = None

    def plan(self, state: dict[str, Any], directory: Path) -> None:
        """Plan a save on all ranks together. `state` holds shapes and no values."""
        dist_save(state, str(directory), self, validate_access_integrity=False, async_sharded_save=True)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> AsyncRequest:
        """Take the plan from Megatron-Core, which calls this in `plan`. Nothing is written yet."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = CheckpointWriter(Path(checkpoint_dir), self.thread_count)
        planned = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(flat, is_loading=False), writer, None, 0, planner=planner
        )
        (_, self._metadata, self._wrapper), self._plan = planned[0], planned[1]
        return AsyncRequest(None, (), [])

    def writer(self, directory: Path, data: Callable[[], Mapping[MetadataIndex, Data]]) -> CheckpointWriter:
        """Make the writer of this rank's items of the plan, without communication."""
        return CheckpointWriter(directory, self.thread_count, self._plan, data)

    def finish(self, writer: CheckpointWriter, directory: Path) -> list[FileEntry]:
        """Describe the checkpoint on rank 0, once all ranks have written. No rank waits for it here.

        Returns:
            The files of this rank.

        Raises:
            EngineError: on rank 0, which could not write it.
        """
        results = self._wrapper.gather_object(writer.results)
        if dist.get_rank() != 0:
            return writer.entries
        try:
            writer.finish(self._metadata, results)
            save_config(CheckpointingConfig(self.backend, self.version), str(directory))
            return [*writer.entries, *(file_entry(directory, directory / name) for name in COMMON_FILES)]
        except OSError as error:
            raise EngineError(f"cannot write {directory}: {error.strerror}") from error


def planned_tensor(key: str, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> ShardedTensor:
    """Elements `box` of a tensor of the checkpoint, without their values."""
    return sharded_tensor(key, torch.empty(extents(box), dtype=dtype, device="meta"), box, shape)


def sharded_tensor(key: str, data: Tensor, box: Box, shape: tuple[int, ...]) -> ShardedTensor:
    """Elements `box` of a tensor of the checkpoint, as Megatron-Core describes boxes that form no regular grid."""
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=extents(box),
        global_shape=shape,
        global_offset=tuple(start for start, _ in box),
        axis_fragmentations=None,
    )


def index_of(key: str, box: Box) -> MetadataIndex:
    """Index of the elements `box` of a tensor in a plan."""
    return MetadataIndex(key, torch.Size([start for start, _ in box]))


def object_index(described: ShardedObject) -> MetadataIndex:
    """Index of an object in a plan."""
    return MetadataIndex(described.unique_key)


def write_tensors(
    directory: Path, tensors: Mapping[str, tuple[Tensor, Box, tuple[int, ...]]], common: dict[str, Any]
) -> list[FileEntry]:
    """Write a sharded checkpoint from this process alone.

    Args:
        directory: made if it does not exist.
        tensors: for each key the values of a box, the box, and the complete tensor's shape.
        common: what belongs to no tensor.

    Returns:
        All files, with paths relative to the directory.

    Raises:
        EngineError: a file could not be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = dict(common)
    data: dict[MetadataIndex, Data] = {object_index(COMMON): serialised(common)}
    for key, (tensor, box, shape) in tensors.items():
        for number, (block, rows) in enumerate(_row_blocks(tensor, box)):
            state[f"{key}#{number}"] = planned_tensor(key, rows, shape, tensor.dtype)
            data[index_of(key, rows)] = partial(_itself, block)
    strategy = SaveStrategy(threads=4)
    with alone():
        strategy.plan(state, directory)
        writer = strategy.writer(directory, lambda: data)
        writer.write()
        if writer.error is not None:
            raise writer.error
        return strategy.finish(writer, directory)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _row_blocks(tensor: Tensor, box: Box) -> Iterator[tuple[Tensor, Box]]:
    """A tensor as blocks of rows that are small enough to be read one at a time."""
    row = max(1, prod(tensor.shape[1:]) * tensor.element_size())
    step = max(1, MAX_CHUNK_BYTES // row)
    for first in range(0, tensor.shape[0], step):
        block = tensor[first : first + step]
        start = box[0][0] + first
        yield block, ((start, start + block.shape[0]), *box[1:])


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A world of this process alone, where there is none yet: Megatron-Core asks for one."""
    if dist.is_initialized():
        yield
        return
    platform.prepare_training()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        with cleaning("process group"):
            dist.destroy_process_group()


def _no_zip_checksums() -> contextlib.AbstractContextManager[None]:
    """Disable the zip checksums of torch.save. They block all threads but one, and the file has a better one."""
    patched: contextlib.AbstractContextManager[None] = cast(Any, config).patch({"save.compute_crc32": False})
    return patched


def _save_tensor(values: Tensor, file: HashedFile) -> None:
    """Write a tensor in host memory. PyTorch writes the format around its values in fifty small parts."""
    buffered = io.BufferedWriter(file, _BUFFER_BYTES)
    try:
        torch.save(_compact(values), cast("IO[bytes]", buffered))
        buffered.detach()  # which writes what it still has
    except RuntimeError:
        if file.error is not None:  # PyTorch's own error says nothing of it
            raise file.error from None
        raise


def _compact(tensor: Tensor) -> Tensor:
    """A contiguous tensor whose storage is its own, because all of a storage is written."""
    tensor = tensor.detach().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.numel():
        return tensor.clone()
    compact = torch.frombuffer(memoryview(tensor.view(-1).view(torch.uint8).numpy()), dtype=torch.uint8)
    return compact.view(tensor.dtype).view(tensor.shape)


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def serialised(value: Any) -> io.BytesIO:
    """An object as Megatron-Core's plans hold it."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream
