"""Page-locked host memory: how long it lives; and on a GPU, that it is what was asked for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from engine3d.platform import platform
from engine3d.platform.cuda.cuda_platform import CudaPlatform
from engine3d.platform.cuda.page_locked import tensor_at

on_gpu = pytest.mark.skipif(platform.gpus == 0, reason="needs a GPU")


def test_memory_is_given_back_when_the_last_view_of_it_is_gone() -> None:
    memory = ctypes.create_string_buffer(b"0123456789")
    given_back: list[int] = []
    tensor = tensor_at(ctypes.addressof(memory), 10, lambda: given_back.append(1))
    view = tensor[2:6].view(torch.int16)
    del tensor
    view[0] = 0x6261
    assert memory.value == b"01ab456789" and not given_back
    storage = view.untyped_storage()
    del view
    assert storage.nbytes() == 10 and not given_back
    del storage
    assert given_back == [1]


@pytest.mark.skipif(platform.gpus > 0, reason="there is memory to have")
def test_without_any_an_error_says_why() -> None:
    assert CudaPlatform().host_memory(0).numel() == 0
    with pytest.raises(RuntimeError, match=r"^cudaHostAlloc: \w"):
        CudaPlatform().host_memory(1)


@pytest.mark.gpu
@on_gpu
def test_no_more_is_taken_than_is_asked_for_and_all_of_it_comes_back() -> None:
    nbytes = (1 << 30) + (1 << 29)
    before, device = _available(), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = platform.host_memory(nbytes).fill_(7)
    assert host.is_pinned() and host[5:].is_pinned()
    assert 0.9 * nbytes < before - _available() < 1.2 * nbytes
    torch.cuda._sleep(10**8)
    device.copy_(host, non_blocking=True)
    del host  # before it is copied
    assert before - _available() < 0.1 * nbytes
    assert bool((device == 7).all())


@pytest.mark.gpu
@on_gpu
def test_what_there_is_not_is_refused_and_forgotten() -> None:
    with pytest.raises(RuntimeError, match="cudaHostAlloc: out of memory"):
        platform.host_memory(1 << 46)
    assert torch.ones(3, device="cuda").sum().item() == 3


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
