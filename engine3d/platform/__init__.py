"""What differs between CUDA and a CPU: one interface, two answers. Nothing else in the project asks for a GPU."""

from __future__ import annotations

import torch

from engine3d.platform.interface import DeviceMemory, Platform, distribution_version

__all__ = ["DeviceMemory", "Platform", "distribution_version", "platform"]


def _detect() -> Platform:
    if torch.cuda.is_available():
        from engine3d.platform.cuda.cuda_platform import CudaPlatform

        return CudaPlatform()
    from engine3d.platform.cpu.cpu_platform import CpuPlatform

    return CpuPlatform()


platform: Platform = _detect()
