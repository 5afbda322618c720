"""Memory that other processes can map, where PyTorch's allocator makes expandable segments of all other memory.

Expandable segments are cuMemCreate memory, which CUDA IPC does not export. PyTorch's allocator can be told to make none
for a while: what it then takes is cudaMalloc memory, since with the setting off no request is served from a free block
of an expandable segment. (A `torch.cuda.MemPool` alone is no way: a pool without an allocator of its own has expandable
segments too, and keeps what is freed in it.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The settings of PyTorch's allocator: the first that is set counts."""

_NAME = "expandable_segments"


def allocator_settings(environment: Mapping[str, str]) -> str:
    """The settings of PyTorch's allocator, such as "expandable_segments:True,max_split_size_mb:512"."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")


def is_expandable(settings: str) -> bool:
    """True if segments are expandable with these settings."""
    return any(_pair(setting) == (_NAME, "true") for setting in settings.split(","))


def without_expandable(settings: str) -> str:
    """The same settings with segments that are not."""
    kept = [setting for setting in settings.split(",") if setting.strip() and _pair(setting)[0] != _NAME]
    return ",".join([*kept, f"{_NAME}:False"])


def not_expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process without expandable segments; none where it has none anyway."""
    if not is_expandable(allocator_settings(environment)):
        return {}
    return {name: without_expandable(environment[name]) for name in VARIABLES if environment.get(name)}


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Memory that PyTorch takes in the block can be shared with other processes; also that of other threads."""
    settings = allocator_settings(os.environ)
    if not is_expandable(settings):
        yield
        return
    torch._C._accelerator_setAllocatorSettings(without_expandable(settings))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _pair(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition(":")
    return name.strip(), value.strip().lower()
