"""GPUs that are not there, for the tests of what asks them: the one stand-in, since NVML needs a GPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import ClassVar

from hybridflow.cluster.devices.nvml import MemoryUse, NvmlReader, Reading

IDLE = MemoryUse(650_000_000, 150_800_000_000)


class Steady(NvmlReader):
    """GPU n is used to 10 * (n + 1) %, holds n + 1 GiB and draws 100 * (n + 1) W. Nobody else holds any memory."""

    def __init__(self, visible: Sequence[str]) -> None:
        self.gpus: Sequence[int] = [int(name) for name in visible]

    def read(self, gpu: int) -> Reading:
        return Reading(10.0 * (gpu + 1), (gpu + 1) * 2**30, 100.0 * (gpu + 1), 1980.0)

    def name(self, gpu: int) -> str:
        return "NVIDIA H200"

    def memory(self, gpu: int) -> MemoryUse:
        return IDLE

    def capability(self, gpu: int) -> tuple[int, int]:
        return 9, 0


class Silent(Steady):
    """Says nothing of its power."""

    def read(self, gpu: int) -> Reading:
        return Reading(50.0, 2**30, math.nan, math.nan)


class Lost(Steady):
    """Falls off the bus at the third sample."""

    reads = 0

    def read(self, gpu: int) -> Reading:
        self.reads += 1
        if self.reads > 2:
            raise OSError("GPU is lost")
        return super().read(gpu)


class Absent(Steady):
    """There is no library to read it with."""

    def __init__(self, visible: Sequence[str]) -> None:
        raise RuntimeError("NVML Shared Library Not Found")


class Taken(Steady):
    """This process and one that cannot be seen from here hold memory of every GPU but the first."""

    def memory(self, gpu: int) -> MemoryUse:
        return MemoryUse(47_200_000_000, 150_800_000_000, (os.getpid(), 2**22 + 7)) if gpu else IDLE


class Freed(Taken):
    """Comes free at the third look."""

    looks: ClassVar[int] = 0

    def memory(self, gpu: int) -> MemoryUse:
        type(self).looks += 1
        return super().memory(gpu) if self.looks < 3 else IDLE


class Stuck(Taken):
    """Says nothing for a minute."""

    def memory(self, gpu: int) -> MemoryUse:
        time.sleep(60)
        return super().memory(gpu)


class Small(Steady):
    """Has 16 GB."""

    def memory(self, gpu: int) -> MemoryUse:
        return MemoryUse(0, 16_000_000_000)


class Blackwell(Steady):
    """GPUs of the next generation."""

    def capability(self, gpu: int) -> tuple[int, int]:
        return 10, 0


class Ampere(Steady):
    """GPUs of the last generation but one."""

    def capability(self, gpu: int) -> tuple[int, int]:
        return 8, 0
