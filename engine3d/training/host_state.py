"""An optimizer's state in host memory. The device has a few chunks of it at a time while it is updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from threading import Event, Thread, main_thread
from typing import TYPE_CHECKING, Any

from engine3d.errors import EngineError, amount, first_line
from engine3d.platform import platform
from engine3d.startup.lazy_imports import torch
from engine3d.training.optimizer import buffer_optimizers

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 29
"""Size of a chunk of the state, large enough that a copy's time is all transfer. A large parameter's chunk is larger.
"""

CHUNKS_ON_DEVICE = 3
"""One is onloaded, one is updated, one is offloaded."""

_ALIGNMENT = 256
_ALLOCATION_S = 600.0


@dataclass
class _Slot:
    """Location of a tensor of the state.

    Args:
        state: the optimizer's, of one parameter. It always has the tensor, on the device or in host memory.
        name: key of the tensor in it.
        start: its first byte in the chunk.
    """

    state: dict[str, Any]
    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def bind(self, memory: Tensor) -> Tensor:
        """Replace the state's tensor by the one in a chunk's memory, and return the former one."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        before: Tensor = self.state[self.name]
        self.state[self.name] = memory[self.start : self.start + nbytes].view(self.dtype).view(self.shape)
        return before


@dataclass
class _StateChunk:
    """Parameters that are updated at once, by the index of their group, and their state, once there is one."""

    parameters: dict[int, list[Tensor]] = field(default_factory=dict)
    slots: list[_Slot] = field(default_factory=list)
    nbytes: int = 0  # an upper bound, before the state is there
    allocation: Future[Tensor] | None = None
    host: Tensor | None = None

    def all_parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(self.parameters.values())

    def bind(self, memory: Tensor) -> None:
        for slot in self.slots:
            slot.bind(memory)

    def offload(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Copy a state that was made on the device to host memory."""
        self.slots, self.nbytes = [], 0
        for parameter in self.all_parameters():
            state = states.get(parameter, {})
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                    self.slots.append(_Slot(state, name, self.nbytes, tensor.shape, tensor.dtype))
                    self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.host is None:
            self.host = self._allocated()[: self.nbytes]
        for slot in self.slots:
            before = slot.bind(self.host)
            slot.state[slot.name].copy_(before, non_blocking=True)

    def _allocated(self) -> Tensor:
        allocation, self.allocation = self.allocation, None
        assert allocation is not None
        try:
            memory = allocation.result(_ALLOCATION_S)
            return memory if memory.numel() >= self.nbytes else platform.host_memory(self.nbytes)
        except TimeoutError:
            raise EngineError(f"host memory: the system gave none for the optimizer in {_ALLOCATION_S:.0f} s") from None
        except (RuntimeError, MemoryError) as error:
            why = first_line(error)
            raise EngineError(
                f"host memory: no {amount(self.nbytes, 1)} more, page-locked, for the optimizer's state ({why}); set "
                "offload=false for it, or give the node more memory"
            ) from None


class HostState:
    """Adam's state in page-locked host memory.

    An optimizer's `step` updates one chunk of the parameters after another. While a chunk is updated, the state of the
    next one is onloaded and that of the previous one is offloaded. The device has three chunks at most, also in the
    step that makes the state, and the copies take as long as the slower direction. An element's result is that of one
    step.

    With `overlap` the complete state is onloaded and updated. `begin_offload` offloads it while the device computes:
    one direction alone is nearly twice as fast as both at once. Until `settle` the state can be read on the device.

    A thread allocates the memory from now on, as a system may need a second for each 3 GB. Other ranks and engines
    start meanwhile, and the first samples are made.

    Args:
        optimizer: Megatron-Core's, over one or several of PyTorch's kind.
        device: where updates are made.
        itemsize: bytes of the state of an element.
        overlap: True if a step ends before the state is in host memory again.

    Attributes:
        watch: called once for each chunk that a step has updated, with the chunk's parameters and their states, which
            are on the device for what it queues. It is removed with the state that it was for.
    """

    def __init__(self, optimizer: Any, device: torch.device, itemsize: int, *, overlap: bool = False) -> None:
        self._device, self._overlap = device, overlap
        self._transfers: dict[int, _ChunkTransfers] = {}  # by the optimizer's id
        self.watch: Callable[[Sequence[tuple[Tensor, dict[str, Any]]]], None] | None = None
        self._chunks: list[tuple[Any, list[_StateChunk]]] = []
        allocations: list[tuple[Future[Tensor], int]] = []
        for inner in (of_buffer.optimizer for of_buffer in buffer_optimizers(optimizer)):
            chunks = list(_chunked(inner.param_groups, itemsize))
            for chunk in chunks:
                chunk.allocation = Future()
                allocations.append((chunk.allocation, chunk.nbytes))
            inner.step = partial(self._step, inner, chunks, inner.step)
            self._chunks.append((inner, chunks))
        self._released = Event()
        arguments = [allocations, device.index or 0, self._released]
        self._allocating = Thread(target=_allocate, args=arguments, name="host memory")
        self._allocating.start()

    @property
    def nbytes(self) -> int:
        """Size of the state in host memory."""
        return sum(chunk.nbytes for _, chunks in self._chunks for chunk in chunks if chunk.host is not None)

    def make(self, initialise: Callable[[Any, Tensor], None]) -> None:
        """Make a state that no step has made, or make it again.

        Args:
            initialise: gives one of PyTorch's optimizers the state of one of its parameters, on the device.
        """
        self.changes()
        for inner, chunks in self._chunks:
            for chunk in chunks:
                for parameter in chunk.all_parameters():
                    initialise(inner, parameter)
                chunk.offload(inner.state)
        platform.synchronize()

    def begin_offload(self) -> None:
        """Begin to offload what is on the device, without waiting for it."""
        for transfers in self._transfers.values():
            transfers.begin_offload()

    def settle(self) -> None:
        """Wait until the state is in host memory alone."""
        if not self._transfers:
            return
        self.begin_offload()
        platform.synchronize()
        while self._transfers:  # without a name, which would keep the memory of the last one
            self._transfers.popitem()[1].finish_offload()
        platform.empty_cache()

    def changes(self) -> None:
        """Prepare for a change of the state by others than a step."""
        self.settle()
        self.watch = None

    def release(self) -> None:
        """Release the memory, which is free once the optimizers are gone, and restore their own `step`."""
        self.settle()
        self._released.set()
        self._allocating.join()
        for inner, _ in self._chunks:
            del inner.step
        self._chunks = []

    def _step(self, inner: Any, chunks: list[_StateChunk], step: Callable[[], None]) -> None:
        if id(inner) in self._transfers:
            self.settle()
        groups = inner.param_groups
        originals = [(group["params"], group.get("step")) for group in groups]
        counted: dict[int, Any] = {}
        platform.empty_cache()  # activations' memory is fragmented, and no fragment may be as large as a chunk
        transfers = _ChunkTransfers(chunks, self._device, all_at_once=self._overlap)
        try:
            for number, chunk in enumerate(chunks):
                transfers.onload(number)
                for index, (group, (_, made)) in enumerate(zip(groups, originals, strict=True)):
                    group["params"] = chunk.parameters.get(index, [])
                    group.pop("step", None)
                    if made is not None:  # Transformer Engine's Adam counts in the group
                        group["step"] = made
                step()
                # Some versions count only in groups with parameters, which the last chunk need not have of each.
                counted |= {index: groups[index]["step"] for index in chunk.parameters if "step" in groups[index]}
                if chunk.host is None:
                    chunk.offload(inner.state)
                else:
                    if self.watch is not None:
                        self.watch([(parameter, inner.state[parameter]) for parameter in chunk.all_parameters()])
                    if not self._overlap:
                        transfers.send(number)
        finally:
            if self._overlap:
                self._transfers[id(inner)] = transfers
            for index, (group, (parameters, _)) in enumerate(zip(groups, originals, strict=True)):
                group["params"] = parameters
                if index in counted:
                    group["step"] = counted[index]
        platform.synchronize()


class _ChunkTransfers:
    """Transfers of chunks between host and device, while the device computes. Chunks without a state stay out of them.

    Args:
        chunks: of an optimizer.
        device: where they are updated.
        all_at_once: True if the device has all of them at a time.
    """

    def __init__(self, chunks: Sequence[_StateChunk], device: torch.device, *, all_at_once: bool) -> None:
        self._chunks = chunks
        streams = torch.get_device_module(device)
        self._use = streams.stream
        self._current = streams.current_stream()
        self._to_device, self._to_host = streams.Stream(), streams.Stream()
        sizes = [chunk.nbytes if chunk.host is not None else 0 for chunk in chunks]
        ring = [max(sizes)] * min(CHUNKS_ON_DEVICE, len(chunks))
        buffers = sizes if all_at_once or sum(sizes) <= sum(ring) else ring
        self._memory = torch.empty(sum(buffers), dtype=torch.uint8, device=device).split(buffers)
        # Further chunks that are onloaded with one. None waits for a buffer where each has its own.
        self._ahead = len(chunks) - 1 if len(buffers) == len(chunks) else 1
        self._to_device.wait_stream(self._current)  # what is queued may still use this memory
        self._onloaded: list[Any] = []
        self._offloaded: list[Any] = []
        self._on_device: list[int] = []

    def onload(self, number: int) -> None:
        """Onload a chunk's state for what is queued from now on, and begin with the next one.

        Where each chunk has a buffer of its own, the first call queues the copies of all: none waits for the host.
        """
        for following in range(len(self._onloaded), min(number + 1 + self._ahead, len(self._chunks))):
            self._fetch(following)
        chunk = self._chunks[number]
        if chunk.host is not None:
            self._current.wait_event(self._onloaded[number])
            chunk.bind(self._device_memory(number))
            self._on_device.append(number)

    def send(self, number: int) -> None:
        """Offload a chunk's state once what is queued is done. The optimizer has it in host memory again."""
        self._to_host.wait_stream(self._current)
        self._copy_back(number)
        self._restore_host(number)

    def begin_offload(self) -> None:
        """Offload all chunks' states concurrently with what is queued from now on. The optimizer has them on the
        device.
        """
        self._to_host.wait_stream(self._current)
        while len(self._offloaded) < len(self._on_device):
            self._copy_back(self._on_device[len(self._offloaded)])

    def finish_offload(self) -> None:
        """Give the optimizer the states in host memory, once the device has made all copies."""
        for number in self._on_device:
            self._restore_host(number)

    def _copy_back(self, number: int) -> None:
        chunk = self._chunks[number]
        assert chunk.host is not None
        with self._use(self._to_host):
            chunk.host.copy_(self._device_memory(number)[: chunk.nbytes], non_blocking=True)
        self._offloaded.append(self._to_host.record_event())

    def _restore_host(self, number: int) -> None:
        chunk = self._chunks[number]
        assert chunk.host is not None
        chunk.bind(chunk.host)

    def _fetch(self, number: int) -> None:
        chunk = self._chunks[number]
        if chunk.host is not None:
            if number >= len(self._memory):
                self._to_device.wait_event(self._offloaded[number - len(self._memory)])
            with self._use(self._to_device):
                self._device_memory(number)[: chunk.nbytes].copy_(chunk.host, non_blocking=True)
        self._onloaded.append(self._to_device.record_event())

    def _device_memory(self, number: int) -> Tensor:
        return self._memory[number % len(self._memory)]


def most_on_device(nbytes: int, largest: int) -> int:
    """Bytes of the device that the update of a state in host memory takes, without `overlap`.

    Args:
        nbytes: of the state.
        largest: of a single parameter's state.
    """
    return min(nbytes, CHUNKS_ON_DEVICE * max(CHUNK_BYTES, largest))


def _allocate(allocations: Sequence[tuple[Future[Tensor], int]], device: int, released: Event) -> None:
    """Allocate memories of these sizes one after the other, until they are released or the process ends."""
    platform.device(device)
    for allocation, nbytes in allocations:
        if released.is_set() or not main_thread().is_alive():  # an end waits for this thread
            return
        try:
            allocation.set_result(platform.host_memory(nbytes))
        except Exception as error:  # for the thread that waits for this one
            allocation.set_exception(error)


def _chunked(groups: Sequence[dict[str, Any]], itemsize: int) -> Iterator[_StateChunk]:
    """Chunks with `CHUNK_BYTES` of state or one parameter; at least one, as a step without parameters counts."""
    chunk = _StateChunk()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            nbytes = itemsize * (parameter.numel() + _ALIGNMENT)  # a byte of it in each tensor, rounded up
            if chunk.nbytes and chunk.nbytes + nbytes > CHUNK_BYTES:
                yield chunk
                chunk = _StateChunk()
            chunk.parameters.setdefault(index, []).append(parameter)
            chunk.nbytes += nbytes
    yield chunk
