"""Readings of the GPUs of one node, in the process that asks for them. No CUDA context is made."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


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


class NvmlReader:
    """Reads GPUs through NVIDIA's management library.

    Args:
        visible: the GPUs as CUDA_VISIBLE_DEVICES names them: by index, or by identifier or its beginning. An index is
            taken for NVML's own; CUDA counts alike where the GPUs of a node are all of one kind.

    Raises:
        pynvml.NVMLError: there is no such library, or no such GPU.
    """

    def __init__(self, visible: Sequence[str]) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        handles = [self._handle(name) for name in visible]
        self._handles = {pynvml.nvmlDeviceGetIndex(handle): handle for handle in handles}
        self.gpus: Sequence[int] = sorted(self._handles)
        """Their indices on the node."""

    def read(self, gpu: int) -> Reading:
        """Read a GPU. Raises pynvml.NVMLError where it cannot be reached."""
        nvml, handle = self._nvml, self._handles[gpu]
        return Reading(
            utilisation=self._known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used,
            power_w=self._known(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            clock_mhz=self._known(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        )

    def name(self, gpu: int) -> str:
        """Name of a GPU, such as "NVIDIA H200". Raises pynvml.NVMLError where it cannot be reached."""
        return str(self._nvml.nvmlDeviceGetName(self._handles[gpu]))

    def memory(self, gpu: int) -> MemoryUse:
        """Read the memory of a GPU in use, and by whom. Raises pynvml.NVMLError where it cannot be reached."""
        nvml, handle = self._nvml, self._handles[gpu]
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            processes = tuple(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except nvml.NVMLError:
            processes = ()
        return MemoryUse(memory.used, memory.total, processes)

    def capability(self, gpu: int) -> tuple[int, int]:
        """CUDA's compute capability, such as (9, 0). Raises pynvml.NVMLError where the GPU cannot be reached."""
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(self._handles[gpu])
        return major, minor

    def _handle(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        for index in range(self._nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(self._nvml.NVMLError):  # a GPU that is lost
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if str(self._nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                    return handle
        return self._nvml.nvmlDeviceGetHandleByUUID(name)  # a part of a GPU

    def _known(self, ask: Callable[[], float]) -> float:
        try:
            return float(ask())
        except self._nvml.NVMLError_NotSupported:  # by this kind of GPU, or by a part of one
            return math.nan


MakeReader = Callable[[Sequence[str]], NvmlReader]
"""Makes the reader of the GPUs that are named as for CUDA_VISIBLE_DEVICES, in the process that reads them."""


def answer[T](name: str, ask: Callable[[NvmlReader, int], T], make_reader: MakeReader | None = None) -> T | None:
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


def visible_gpus() -> dict[int, str]:
    """The GPUs of this host that CUDA_VISIBLE_DEVICES leaves, as it names them, by the index that a recipe counts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return dict(enumerate(name for word in visible.split(",") if (name := word.strip()) not in ("", "-1")))
    try:
        import pynvml

        pynvml.nvmlInit()
        return {index: str(index) for index in range(pynvml.nvmlDeviceGetCount())}
    except Exception:  # no driver, or no library: no GPU
        return {}


def driver_versions() -> tuple[str | None, str | None]:
    """Versions of NVIDIA's driver and of the CUDA that it knows; None on a host that has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except Exception:  # no library, no driver, or one that does not answer
        return None, None
