"""Process groups of gloo whose connections one thread of the process serves.

PyTorch makes a device of its own for each gloo group: a thread that wakes 100 times a second, and sockets that listen.
A rank of Megatron-Core has about 20 groups.
"""

from __future__ import annotations

import atexit
from typing import Any

from engine3d.startup.lazy_imports import dist

BACKEND = "shared_gloo"

_devices: list[Any] = []


def register() -> None:
    """Register the backend with PyTorch, once a process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
        atexit.register(_leave)


def _leave() -> None:
    """End the groups: the thread of their device may call Python, which ends a process in which Python has ended."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _create(group: Any, _: Any) -> dist.ProcessGroupGloo:
    """Create a group's backend as PyTorch does for "gloo", but for the devices, which are the first group's."""
    if _devices:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = _devices, group.timeout
        backend: Any = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)
    else:
        backend = dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, timeout=group.timeout)
        _devices.extend(backend.options._devices)
    backend.options.global_ranks_in_group = group.global_ranks_in_group
    backend.options.group_name = group.group_id
    backend._set_sequence_number_for_group()
    return backend
