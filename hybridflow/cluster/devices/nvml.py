"""Readings of the GPUs of one node, in the process that asks for them. No CUDA context is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of a GPU; nan for a value that it does not give.

    Args:
        utilisation: share of the last moments in which a kernel ran, in %.
        memory_bytes: in use, by whatever process.
        power_w: drawn, in W.
        clock_mhz: of the streaming multiprocessors, in MHz.
    """

    utilisation: float
    memory_bytes: int
    power_w: float
    clock_mhz: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a GPU.

    Args:
        used_bytes: by whatever process, and by the driver: 0.65 GB of an idle H200.
        total_bytes: that it has.
        processes: ids of those that compute on it; none where the driver does not say, as inside a container.
    """

    used_bytes: int
    total_bytes: int
    processes: tuple[int, ...] = ()


class DeviceReader(Protocol):
    """Reads the GPUs of one node."""

    gpus: Sequence[int]
    """Their indices on the node."""

    def read(self, gpu: int) -> Reading:
        """Read a GPU."""

    def memory(self, gpu: int) -> MemoryUse:
        """Read the memory of a GPU in use, and by whom."""

    def capability(self, gpu: int) -> tuple[int, int]:
        """CUDA's compute capability of a GPU, such as (9, 0)."""


class NvmlReader:
    """Reads GPUs through NVIDIA's management library.

    Args:
        visible: the GPUs as CUDA_VISIBLE_DEVICES names them: by index or identifier. An index is taken for NVML's own;
            CUDA counts alike where the GPUs of a node are all of one kind.

    Raises:
        pynvml.NVMLError: there is no such library, or no such GPU.
    """

    def __init__(self, visible: Sequence[str]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible
        ]
        self._handles = {pynvml.nvmlDeviceGetIndex(handle): handle for handle in handles}
        self.gpus: Sequence[int] = sorted(self._handles)

    def read(self, gpu: int) -> Reading:
        """Read a GPU. Raises pynvml.NVMLError where it cannot be reached."""
        nvml, handle = self._nvml, self._handles[gpu]
        return Reading(
            utilisation=self._known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used,
            power_w=self._known(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            clock_mhz=self._known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        )

    def memory(self, gpu: int) -> MemoryUse:
        """Read the memory of a GPU in use. Raises pynvml.NVMLError where it cannot be reached."""
        nvml, handle = self._nvml, self._handles[gpu]
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError:
            processes = ()
        return MemoryUse(memory.used, memory.total, processes)

    def capability(self, gpu: int) -> tuple[int, int]:
        """CUDA's compute capability. Raises pynvml.NVMLError where the GPU cannot be reached."""
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(self._handles[gpu])
        return major, minor

    def _known(self, ask: Callable[[], float]) -> float:
        try:
            return float(ask())
        except self._nvml.NVMLError_NotSupported:  # by this kind of GPU, or by a part of one
            return math.nan


MakeReader = Callable[[Sequence[str]], DeviceReader]
"""Makes the reader of the GPUs that are named as for CUDA_VISIBLE_DEVICES, in the process that reads them."""


def answer[T](name: str, ask: Callable[[DeviceReader, int], T], make_reader: MakeReader | None = None) -> T | None:
    """Ask one GPU; None where it cannot be read, for whatever reason.

    Args:
        name: the GPU as CUDA_VISIBLE_DEVICES names it.
        ask: asks a reader, of the GPU with this index on the node.
        make_reader: for GPUs that are not NVIDIA's.
    """
    try:
        reader = (make_reader or NvmlReader)([name])
        [gpu] = reader.gpus
        return ask(reader, gpu)
    except Exception:
        return None
