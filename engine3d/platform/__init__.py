"""Differences between CUDA and a CPU: one interface, two implementations. No other package asks for a GPU."""

from __future__ import annotations

import ctypes
import os

from engine3d.platform.interface import DeviceMemory, Platform, distribution_version
from engine3d.startup.lazy_imports import torch

__all__ = ["DeviceMemory", "Platform", "distribution_version", "platform"]


def _detect() -> Platform:
    if _has_driver() and torch.cuda.is_available():
        from engine3d.platform.cuda.cuda_platform import CudaPlatform

        return CudaPlatform()
    from engine3d.platform.cpu.cpu_platform import CpuPlatform

    return CpuPlatform()


_DEVICES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Files of drivers of GPUs, also of those that torch finds by a path of its own."""


def _has_driver() -> bool:
    """True if a driver of GPUs may be installed; torch, which takes a second to import, sees no GPU without one."""
    if any(map(os.path.exists, _DEVICES)):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


platform: Platform = _detect()
