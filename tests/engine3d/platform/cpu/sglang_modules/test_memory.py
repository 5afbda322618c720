"""Memory that an engine on a CPU releases is the system's again, at the same addresses."""

from __future__ import annotations

import pytest
import torch

from engine3d.platform.cpu.cpu_platform import CpuPlatform
from engine3d.platform.cpu.sglang_modules.memory import CpuMemorySaver

MB = 1 << 20


def _resident() -> int:
    return CpuPlatform().memory().allocated


@pytest.mark.slow
def test_released_memory_is_given_back_and_comes_back_without_its_values() -> None:
    saver = CpuMemorySaver()
    outside = torch.ones(4 * MB)
    with saver.region("weights"):
        weights = [torch.nn.Parameter(torch.full((8 * MB,), 3.0)), torch.randn(MB).t(), torch.ones(5)]
        del weights[1]
        outside.view(2, -1)[0].add_(0)  # of which nothing was taken here
    with saver.region("kv_cache"):
        cache = torch.zeros(16 * MB)
    addresses = [tensor.data_ptr() for tensor in (*weights, cache)]
    view = weights[0].data.view(8, -1)[3]
    before = _resident()
    saver.pause("weights")
    assert 31 * MB < before - _resident() < 34 * MB
    saver.pause("kv_cache")
    assert 94 * MB < before - _resident() < 98 * MB
    assert outside.sum() == 4 * MB
    saver.resume("kv_cache")
    saver.resume("weights")
    assert abs(before - _resident()) < 3 * MB
    assert [tensor.data_ptr() for tensor in (*weights, cache)] == addresses
    assert not (weights[0] == 3).any() and not (cache == 0).any() and not (weights[1] == 1).any()
    weights[0].data.fill_(2)
    assert view.sum() == view.numel() * 2
