"""An optimizer's state in host memory, of which the device has a few parts at a time while it is updated."""

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
from engine3d.training.optimizer import of_buffers

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 1 << 29
"""Of the state that is moved at once: a copy's time is then all transfer. The state of a large parameter is more."""

PARTS_ON_DEVICE = 3
"""One comes, one is updated, one goes."""

_ALIGNMENT = 256
_TAKING_S = 600.0


@dataclass
class _Slot:
    """Where a tensor of the state lies.

    Args:
        state: the optimizer's, of one parameter; it always holds the tensor, wherever that is.
        name: of the tensor in it.
        start: its first byte in the part.
    """

    state: dict[str, Any]
    name: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def lie_in(self, memory: Tensor) -> Tensor:
        """Let the state's tensor be the one in a part's memory, and return it as it was."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        before: Tensor = self.state[self.name]
        self.state[self.name] = memory[self.start : self.start + nbytes].view(self.dtype).view(self.shape)
        return before


@dataclass
class _Part:
    """Parameters that are updated at once, by the index of their group; and their state, once there is one."""

    parameters: dict[int, list[Tensor]] = field(default_factory=dict)
    slots: list[_Slot] = field(default_factory=list)
    nbytes: int = 0  # at most so many, before the state is there
    taken: Future[Tensor] | None = None
    host: Tensor | None = None

    def every(self) -> Iterator[Tensor]:
        return chain.from_iterable(self.parameters.values())

    def lie_in(self, memory: Tensor) -> None:
        for slot in self.slots:
            slot.lie_in(memory)

    def put_away(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Move a state that was made on the device."""
        self.slots, self.nbytes = [], 0
        for parameter in self.every():
            state = states.get(parameter, {})
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                    self.slots.append(_Slot(state, name, self.nbytes, tensor.shape, tensor.dtype))
                    self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.host is None:
            self.host = self._taken()[: self.nbytes]
        for slot in self.slots:
            before = slot.lie_in(self.host)
            slot.state[slot.name].copy_(before, non_blocking=True)

    def _taken(self) -> Tensor:
        taken, self.taken = self.taken, None
        assert taken is not None
        try:
            memory = taken.result(_TAKING_S)
            return memory if memory.numel() >= self.nbytes else platform.host_memory(self.nbytes)
        except TimeoutError:
            raise EngineError(f"host memory: the system gave none for the optimizer in {_TAKING_S:.0f} s") from None
        except (RuntimeError, MemoryError) as error:
            why = first_line(error)
            raise EngineError(
                f"host memory: no {amount(self.nbytes, 1)} more, page-locked, for the optimizer's state ({why}); set "
                "offload=false for it, or give the node more memory"
            ) from None


class HostState:
    """Keeps what Adam knows of its parameters in page-locked host memory.

    An optimizer's `step` becomes one over a part of the parameters after another. While a part is updated, the state of
    the next one comes and that of the one before goes: the device has three parts at most, also in the step that makes
    the state, and the copies take as long as the slower direction. An element's result is that of a single step.

    With `overlap` the whole state comes and is updated, and goes with `leave`, beside what the device does then: a
    direction alone is nearly twice as fast as both at once. Until `settle` the state is on the device to be read.

    The memory is taken from now on in a thread, as a system may need a second for each 3 GB: other ranks and engines
    start meanwhile, and the first samples are made.

    Args:
        optimizer: Megatron-Core's, over one or several of PyTorch's kind.
        device: where updates are made.
        itemsize: bytes of the state of an element.
        overlap: whether a step ends before the state is in host memory again.

    Attributes:
        watch: called once for each part that a step has updated, with the part's parameters and their states, which are
            on the device for what it queues; forgotten with the state that it was for.
    """

    def __init__(self, optimizer: Any, device: torch.device, itemsize: int, *, overlap: bool = False) -> None:
        self._device, self._overlap = device, overlap
        self._staying: dict[int, _Way] = {}  # by the optimizer's id
        self.watch: Callable[[Sequence[tuple[Tensor, dict[str, Any]]]], None] | None = None
        self._parts: list[tuple[Any, list[_Part]]] = []
        wanted: list[tuple[Future[Tensor], int]] = []
        for inner in (each.optimizer for each in of_buffers(optimizer)):
            parts = list(_cut(inner.param_groups, itemsize))
            for part in parts:
                part.taken = Future()
                wanted.append((part.taken, part.nbytes))
            inner.step = partial(self._step, inner, parts, inner.step)
            self._parts.append((inner, parts))
        self._released = Event()
        self._taking = Thread(target=_take, args=[wanted, device.index or 0, self._released], name="host memory")
        self._taking.start()

    @property
    def nbytes(self) -> int:
        """Host memory in which the state lies."""
        return sum(part.nbytes for _, parts in self._parts for part in parts if part.host is not None)

    def make(self, initialise: Callable[[Any, Tensor], None]) -> None:
        """Make a state that no step has made, or make it anew.

        Args:
            initialise: gives one of PyTorch's optimizers the state of one of its parameters, on the device.
        """
        self.changes()
        for inner, parts in self._parts:
            for part in parts:
                for parameter in part.every():
                    initialise(inner, parameter)
                part.put_away(inner.state)
        platform.synchronize()

    def leave(self) -> None:
        """Begin to bring what is on the device back to host memory, and do not wait for it."""
        for way in self._staying.values():
            way.leave()

    def settle(self) -> None:
        """Have the state in host memory alone."""
        if not self._staying:
            return
        self.leave()
        platform.synchronize()
        while self._staying:  # no name is left for the last one, whose memory would be kept and cut up for gradients
            self._staying.popitem()[1].left()
        platform.empty_cache()

    def changes(self) -> None:
        """The state is going to be changed by others than a step."""
        self.settle()
        self.watch = None

    def release(self) -> None:
        """Let go of the memory, which is free once the optimizers are gone, and give them their own `step`."""
        self.settle()
        self._released.set()
        self._taking.join()
        for inner, _ in self._parts:
            del inner.step
        self._parts = []

    def _step(self, inner: Any, parts: list[_Part], step: Callable[[], None]) -> None:
        if id(inner) in self._staying:
            self.settle()
        groups = inner.param_groups
        whole = [(group["params"], group.get("step")) for group in groups]
        counted: dict[int, Any] = {}
        platform.empty_cache()  # activations' memory is in pieces, none of which may be as large as a part
        way = _Way(parts, self._device, whole=self._overlap)
        try:
            for number, part in enumerate(parts):
                way.bring(number)
                for index, (group, (_, made)) in enumerate(zip(groups, whole, strict=True)):
                    group["params"] = part.parameters.get(index, [])
                    group.pop("step", None)
                    if made is not None:  # Transformer Engine's Adam counts in the group
                        group["step"] = made
                step()
                # Some versions count only in groups with parameters, which the last part need not have of each.
                counted |= {index: groups[index]["step"] for index in part.parameters if "step" in groups[index]}
                if part.host is None:
                    part.put_away(inner.state)
                else:
                    if self.watch is not None:
                        self.watch([(parameter, inner.state[parameter]) for parameter in part.every()])
                    if not self._overlap:
                        way.send(number)
        finally:
            if self._overlap:
                self._staying[id(inner)] = way
            for index, (group, (parameters, _)) in enumerate(zip(groups, whole, strict=True)):
                group["params"] = parameters
                if index in counted:
                    group["step"] = counted[index]
        platform.synchronize()


class _Way:
    """Parts between host and device, beside the device's work. Those that have no state yet are left alone.

    Args:
        parts: of an optimizer.
        device: where they are updated.
        whole: whether all of them are there at a time.
    """

    def __init__(self, parts: Sequence[_Part], device: torch.device, *, whole: bool) -> None:
        self._parts = parts
        streams = torch.get_device_module(device)
        self._use = streams.stream
        self._current = streams.current_stream()
        self._coming, self._going = streams.Stream(), streams.Stream()
        sizes = [part.nbytes if part.host is not None else 0 for part in parts]
        ring = [max(sizes)] * min(PARTS_ON_DEVICE, len(parts))
        places = sizes if whole or sum(sizes) <= sum(ring) else ring
        self._memory = torch.empty(sum(places), dtype=torch.uint8, device=device).split(places)
        # Parts that come with the one that is brought. None waits for a place where each has its own.
        self._ahead = len(parts) - 1 if len(places) == len(parts) else 1
        self._coming.wait_stream(self._current)  # what is queued may still use this memory
        self._came: list[Any] = []
        self._gone: list[Any] = []
        self._here: list[int] = []

    def bring(self, number: int) -> None:
        """Have a part's state on the device for what is queued from now on, and the next one on its way.

        Where each part has a place of its own, the first call queues the copies of all: none waits for the host.
        """
        for each in range(len(self._came), min(number + 1 + self._ahead, len(self._parts))):
            self._fetch(each)
        part = self._parts[number]
        if part.host is not None:
            self._current.wait_event(self._came[number])
            part.lie_in(self._place(number))
            self._here.append(number)

    def send(self, number: int) -> None:
        """Bring a part's state back once what is queued is done; the optimizer has it in host memory again."""
        self._going.wait_stream(self._current)
        self._copy_back(number)
        self._lie_there(number)

    def leave(self) -> None:
        """Bring all parts' states back beside what is queued from now on; the optimizer has them on the device."""
        self._going.wait_stream(self._current)
        while len(self._gone) < len(self._here):
            self._copy_back(self._here[len(self._gone)])

    def left(self) -> None:
        """The device has made all copies: the optimizer has the states in host memory."""
        for number in self._here:
            self._lie_there(number)

    def _copy_back(self, number: int) -> None:
        part = self._parts[number]
        assert part.host is not None
        with self._use(self._going):
            part.host.copy_(self._place(number)[: part.nbytes], non_blocking=True)
        self._gone.append(self._going.record_event())

    def _lie_there(self, number: int) -> None:
        part = self._parts[number]
        assert part.host is not None
        part.lie_in(part.host)

    def _fetch(self, number: int) -> None:
        part = self._parts[number]
        if part.host is not None:
            if number >= len(self._memory):
                self._coming.wait_event(self._gone[number - len(self._memory)])
            with self._use(self._coming):
                self._place(number)[: part.nbytes].copy_(part.host, non_blocking=True)
        self._came.append(self._coming.record_event())

    def _place(self, number: int) -> Tensor:
        return self._memory[number % len(self._memory)]


def most_on_device(nbytes: int, largest: int) -> int:
    """Bytes of the device that the update of a state in host memory takes, without `overlap`.

    Args:
        nbytes: of the state.
        largest: of which a single parameter's state takes so many.
    """
    return min(nbytes, PARTS_ON_DEVICE * max(PART_BYTES, largest))


def _take(wanted: Sequence[tuple[Future[Tensor], int]], device: int, released: Event) -> None:
    """Take memories of these sizes one after the other, until they are not wanted any more or the process ends."""
    platform.device(device)
    for taken, nbytes in wanted:
        if released.is_set() or not main_thread().is_alive():  # an end waits for this thread
            return
        try:
            taken.set_result(platform.host_memory(nbytes))
        except Exception as error:  # for the thread that waits for this one
            taken.set_exception(error)


def _cut(groups: Sequence[dict[str, Any]], itemsize: int) -> Iterator[_Part]:
    """Parts whose state is of `PART_BYTES` or of one parameter; at least one, as a step without parameters counts."""
    part = _Part()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            nbytes = itemsize * (parameter.numel() + _ALIGNMENT)  # a byte of it in each tensor, and those rounded up
            if part.nbytes and part.nbytes + nbytes > PART_BYTES:
                yield part
                part = _Part()
            part.parameters.setdefault(index, []).append(parameter)
            part.nbytes += nbytes
    yield part
