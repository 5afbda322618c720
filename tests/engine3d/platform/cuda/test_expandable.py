"""Memory to share beside expandable segments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine3d.platform import platform
from engine3d.platform.cuda import expandable as cuda_expandable
from engine3d.platform.cuda.expandable import allocator_settings, is_expandable, not_expandable, without_expandable

EXPANDABLE = "max_split_size_mb:512, expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
NOT = "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False"


def test_only_the_one_setting_is_another() -> None:
    assert is_expandable(EXPANDABLE) and is_expandable("expandable_segments:true")
    assert not is_expandable("expandable_segments:False") and not is_expandable("")
    assert without_expandable(EXPANDABLE) == NOT
    assert without_expandable("expandable_segments:True") == "expandable_segments:False"
    assert not_expandable({"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PATH": "/"}) == {"PYTORCH_CUDA_ALLOC_CONF": NOT}
    assert not_expandable({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}) == {}
    both = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    assert allocator_settings(both) == "backend:native" and not_expandable(both) == {}


def test_segments_are_expandable_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with cuda_expandable.shareable_memory():
        assert settings == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    with pytest.raises(ZeroDivisionError), cuda_expandable.shareable_memory():
        assert settings == [NOT]
        _ = 1 / 0
    assert settings == [NOT, EXPANDABLE]


def test_an_engine_with_the_memory_saver_has_no_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_memory_saver ends a process that has them."""
    from engine3d.platform.cuda.cuda_platform import CudaPlatform

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    assert CudaPlatform().rollout_environment(1, memory_saver=True) == {"PYTORCH_CUDA_ALLOC_CONF": NOT}
    assert CudaPlatform().rollout_environment(1, memory_saver=False) == {}


_SHARES = """
import torch
from engine3d.errors import EngineError
from engine3d.platform import platform

platform.device(0)
before = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
free = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
del free  # a block of an expandable segment, large enough for all that follows
with platform.shareable_memory():
    shared = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in (1000, 3 << 20, 128 << 20)]
after = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
for tensor in shared:
    platform.share_memory(tensor.untyped_storage())
for tensor in (before, after):
    try:
        platform.share_memory(tensor.untyped_storage())
    except EngineError as error:
        print("refused:", error)
expandable = [each for each in torch.cuda.memory_snapshot() if each["is_expandable"]]
print("expandable:", sum(each["total_size"] for each in expandable) >> 20)
print("not:", sum(each["total_size"] for each in torch.cuda.memory_snapshot() if not each["is_expandable"]) >> 20)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not platform.gpus, reason="needs a GPU")
def test_what_is_to_be_shared_is_memory_of_cudamalloc_and_the_rest_expandable() -> None:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", _SHARES], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["refused", "refused", "expandable", "not"]
    assert int(lines[2].split()[-1]) >= 64 + 256
    assert lines[3] == f"not: {2 + 20 + 128}"  # what PyTorch takes of cudaMalloc for the three
