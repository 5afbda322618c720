"""GPUs that are not there, for the tests of what samples them: the one stand-in, since NVML needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridflow.device_monitor import Reading


class Steady:
    """GPU n is used to 10 * (n + 1) %, holds n + 1 GiB and draws 100 * (n + 1) W."""

    def __init__(self, visible: Sequence[str]) -> None:
        self.gpus = [int(name) for name in visible]

    def read(self, gpu: int) -> Reading:
        return Reading(10.0 * (gpu + 1), (gpu + 1) * 2**30, 100.0 * (gpu + 1), 1980.0)


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
