"""Processors on a GPU's side of a host: they start its work sooner, and host memory that they take lies there too."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_FEWEST = 4
"""A rank has a thread that starts work, autograd's, NCCL's and those that write files."""


def near(device: str, usable: AbstractSet[int], devices: Path = _DEVICES) -> set[int]:
    """Select the processors on the same side of the host as a device.

    Args:
        device: its address on the PCI bus, as "0000:1b:00.0".
        usable: the processors.
        devices: where Linux tells of the bus.

    Returns:
        All `usable` ones where the host does not say, as in some virtual machines, or where almost none would be left.
    """
    try:
        text = (devices / device / "local_cpulist").read_text()
    except OSError:
        return set(usable)
    local = usable & _processors(text.strip())
    return set(local if len(local) >= _FEWEST else usable)


def stay_near(device: str, devices: Path = _DEVICES) -> None:
    """Keep this thread, and those that it starts from here on, to the processors near a device."""
    usable = os.sched_getaffinity(0)
    if (local := near(device, usable, devices)) != usable:
        os.sched_setaffinity(0, local)


def _processors(text: str) -> set[int]:
    """Parse a list as Linux writes it: "0-31,64-95"."""
    processors: set[int] = set()
    for interval in filter(None, text.split(",")):
        first, _, last = interval.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors
